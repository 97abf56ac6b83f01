"""Rules that Prometheus accepts, alerts that fire when they should, queries of what there is."""

import copy
import re
import shutil
import subprocess
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from cluster.control.metrics import PolicyMetrics
from cluster.metrics import EngineMetrics, GatewayMetrics, collect
from tests.monitoring.rules import groups, panels, program, rules, variables

ALERTS = Path(__file__).with_name("alerts.yaml")
NAME = re.compile(r"\bdrafthouse_[a-z_]+\b")
RECORDED = re.compile(r"\bdrafthouse:[a-z_:0-9]+")
ELSEWHERE = {  # counted by processes that need more than a registry to be made
    "drafthouse_members",
    "drafthouse_draft_exchange_seconds_bucket",
    "drafthouse_authentication_failures_total",
}


def promtool(*args: str, folder: Path) -> None:
    """Run it; it must have nothing to say against its files."""
    done = subprocess.run(
        [program("promtool"), *args], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """Syntax, names, labels and the templates of annotations."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    promtool("check", "rules", "--lint-fatal", "rules.yaml", folder=tmp_path)


def test_every_alert_fires_on_its_condition_and_not_before(tmp_path: Path) -> None:
    """On series that show it, in promtool's own time; and on healthy ones it is silent."""
    plain = copy.deepcopy(groups())
    for group in plain:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": plain}))
    shutil.copy(ALERTS, tmp_path)
    promtool("test", "rules", ALERTS.name, folder=tmp_path)


def test_no_alert_is_left_out_of_those_tests() -> None:
    """Each has a series on which it fires, and a moment at which it does not."""
    firing, silent = set(), set()
    for case in yaml.safe_load(ALERTS.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            (firing if check.get("exp_alerts") else silent).add(check["alertname"])
    alerts = {rule["alert"] for group in groups() for rule in group["rules"] if "alert" in rule}
    assert firing == silent == alerts


def test_rules_and_panels_ask_for_what_there_is() -> None:
    """A metric that is renamed, or a name with a slip in it, would be an alert that never fires."""
    registry = CollectorRegistry()
    EngineMetrics(registry, model="m", num_positions=1)
    PolicyMetrics(registry, model="m")
    GatewayMetrics(registry, model="m")
    there = {sample[0] for family in collect(registry) for sample in family.samples} | ELSEWHERE
    asked = [
        *rules().items(),
        *((title, query) for title, queries in panels().items() for query in queries),
        *variables().items(),
    ]
    for where, expression in asked:
        recorded = set(RECORDED.findall(expression))
        assert recorded <= rules().keys(), where
        names = set(NAME.findall(RECORDED.sub("", expression)))
        assert names or recorded, where
        assert names <= there, where
