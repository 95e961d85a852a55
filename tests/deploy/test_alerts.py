"""The alert rules: Prometheus' own checker accepts them, they fire when they should, and each says what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.redis.checks import CONDITIONS
from deploy.prometheus.__main__ import FILE, text
from tests.deploy.manifests import OVERLAYS, WITH_VLLM, of_kind
from tests.deploy.queries import ROOT, RULES, alerts
from tests.programs import needs

CASES = Path(__file__).parent / "alerts.yml"


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


@needs("prometheus")
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("prometheus")
def test_the_configuration_of_prometheus_loads_the_rules() -> None:
    done = promtool("check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


@needs("prometheus")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def fired(case: Any) -> set[str]:
    """The alerts that a case expects to fire."""
    by_expression = [sample["labels"] for test in case.get("promql_expr_test", ()) for sample in test["exp_samples"]]
    by_name = {test["alertname"] for test in case.get("alert_rule_test", ()) if test.get("exp_alerts")}
    return by_name | set(re.findall(r'alertname="(\w+)"', "".join(by_expression)))


def test_for_every_alert_there_is_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    assert set().union(*map(fired, cases)) == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_how_bad_it_is_and_what_it_is_and_where_to_read_on(rule: Any) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/alerts.md#alert-{kebab(rule['alert'])}"


def test_the_file_for_the_operator_is_what_is_made_of_the_rules() -> None:
    assert FILE.read_text() == text(), "run: python -m deploy.prometheus"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_has_the_same_rules_in_kubernetes(overlay: str) -> None:
    built = [group for document in of_kind(overlay, "PrometheusRule") for group in document["spec"]["groups"]]
    assert built == (yaml.safe_load(RULES.read_text())["groups"] if overlay in WITH_VLLM else [])


def test_every_alert_has_a_section_that_says_its_severity_how_to_see_and_what_to_do() -> None:
    parts = re.split(r"^## Alert (\S+)\n", (ROOT / "docs" / "alerts.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(sections) == [kebab(rule["alert"]) for rule in alerts()]
    for rule in alerts():
        text = sections[kebab(rule["alert"])]
        assert f"({rule['labels']['severity']}" in text, rule["alert"]
        assert text.index("**See**") < text.index("**Do**"), rule["alert"]


def test_every_condition_of_the_store_is_one_alerts() -> None:
    matchers = [match for rule in alerts() for match in re.findall(r'condition(=~|!~|=)"([^"]+)"', rule["expr"])]
    for condition in CONDITIONS:
        firing = [1 for how, names in matchers if (condition in names.split("|")) == (how != "!~")]
        assert len(firing) == 1, condition
    assert {name for _, names in matchers for name in names.split("|")} <= set(CONDITIONS)
