"""The files operators get, and the programs of Prometheus to hold against them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent.parent.parent / "k8s" / "base" / "monitoring"
RULES = FOLDER / "rules.yaml"
DASHBOARD = FOLDER / "dashboard.json"
VARIABLES = {"$model": ".*", "$tenant": ".*", "$__rate_interval": "20s"}


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path


def groups() -> list[dict[str, Any]]:
    """The rule groups."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return found


def rules() -> dict[str, str]:
    """Every rule's expression by the rule's name."""
    return {
        rule.get("alert") or rule["record"]: rule["expr"]
        for group in groups()
        for rule in group["rules"]
    }


def panels() -> dict[str, list[str]]:
    """Every panel's queries by the panel's title, for all models and tenants."""
    found: dict[str, list[str]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"] not in found, "a title twice"
        found[panel["title"]] = [_filled(target["expr"]) for target in panel["targets"]]
    return found


def variables() -> dict[str, str]:
    """The queries that fill the dashboard's variables, as series selectors."""
    found = {}
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            selector = query.removeprefix("label_values(").rsplit(",", 1)[0]
            found[variable["name"]] = _filled(selector)
    return found


def _filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression
