"""A real Prometheus that scrapes one page, for as long as a test needs it."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from cluster.actors.ports import free_ports
from tests.monitoring.rules import groups, program

START_SECONDS = 300.0
Sample = tuple[dict[str, str], float]


class Prometheus:
    """Asked over its HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ready(self) -> bool:
        """Whether it answers."""
        with suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).close()
            return True
        return False

    def query(self, expression: str) -> list[Sample]:
        """The samples that an expression has now; fails when it cannot be evaluated."""
        data = self._get("query", query=expression)
        assert data["resultType"] == "vector", expression
        return [(item["metric"], float(item["value"][1])) for item in data["result"]]

    def value(self, expression: str) -> float | None:
        """The one value of an expression, None without any."""
        samples = self.query(expression)
        assert len(samples) <= 1, expression
        return samples[0][1] if samples else None

    def series(self, selector: str) -> list[dict[str, str]]:
        """The label sets that a selector finds."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": selector})
        return found

    def failed_rules(self) -> list[str]:
        """Rules whose last evaluation was no success."""
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in self._get("rules")["groups"]
            for rule in group["rules"]
            if rule["health"] != "ok"
        ]

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return {
            alert["labels"]["alertname"]
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def _get(self, path: str, **parameters: str) -> Any:  # noqa: ANN401 - the API's own shapes
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads `target`'s page and evaluates all rules every second."""
    rules = [group | {"interval": "1s"} for group in groups()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {"job_name": "drafthouse", "static_configs": [{"targets": [target]}]}
                ],
            }
        )
    )
    [port] = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        prometheus = Prometheus(address)
        end = time.monotonic() + START_SECONDS
        while not prometheus.ready():
            assert process.poll() is None, "Prometheus ended"
            assert time.monotonic() < end, "Prometheus does not start"
            time.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        process.wait()
