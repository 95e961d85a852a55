"""Every metric and label in dashboards and alerts exists, and a real Prometheus answers all their queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.deploy.monitored import (
    Monitored,
    Prometheus,
    let_it_all_happen,
    running_monitored,
    running_prometheus,
)
from tests.deploy.queries import (
    OTHERS,
    Labels,
    adapters_query,
    alerts,
    panel_queries,
    result_labels,
    rules,
    templated_labels,
    variable_queries,
)
from tests.polling import wait_until
from tests.programs import needs

# The first test waits until the shared cluster is up and has served requests.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with running_monitored(tmp_path_factory.mktemp("monitored")) as found:
        let_it_all_happen(found)
        yield found


@pytest.fixture(scope="module")
def known(monitored: Monitored) -> Mapping[str, Labels]:
    """The metrics that queries can use: exposed ones, Prometheus' own, and those that the rules record."""
    last = {"kvgate_store_samples_total", "kvgate_wrong_predictions_total"}  # after a sample and an audit
    metrics = wait_until(lambda: found if last <= (found := monitored.exposed()).keys() else {}) | OTHERS
    return metrics | {rule["record"]: result_labels(rule["expr"], metrics) for rule in rules() if "record" in rule}


@pytest.fixture(scope="module")
def prometheus(monitored: Monitored, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), monitored.targets) as found:
        targets = sum(len(urls) for urls in monitored.targets.values())
        wait_until(lambda: len(found.series("up == 1")) == targets)
        let_it_all_happen(monitored)  # while Prometheus scrapes: a rate needs two values
        wait_until(lambda: found.series("increase(kvgate_residency_doubts_total[1m]) > 0"))
        yield found


def test_every_query_of_a_panel_names_metrics_and_labels_that_there_are(known: Mapping[str, Labels]) -> None:
    for panel, expr, legend in panel_queries():
        labels = result_labels(expr, known)
        assert templated_labels(legend) <= labels, f"{panel}: {legend} shows what {expr} does not have"


def test_every_variable_takes_its_values_from_a_label_that_there_is(known: Mapping[str, Labels]) -> None:
    for variable, selector, label in variable_queries():
        assert label in result_labels(selector, known), variable


def test_every_rule_names_metrics_and_labels_that_there_are(known: Mapping[str, Labels]) -> None:
    for rule in rules():
        labels = result_labels(rule["expr"], known)
        for text in rule.get("annotations", {}).values():
            assert templated_labels(text) <= labels, f"{rule['alert']}: {text}"


def test_the_query_of_prometheus_adapter_names_metrics_and_labels_that_there_are(known: Mapping[str, Labels]) -> None:
    assert "<<" not in adapters_query()
    assert result_labels(adapters_query(), known) == frozenset()


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ("rate(kvgate_request_total[1m])", "no metric is called kvgate_request_total"),
        ('kvgate_store_up{replica="r0"}', "no series has ['replica']"),
        ("sum by (gateway) (kvgate_store_up)", "no series has ['gateway']"),
        ("kvgate_store_up unless on (replica) kvgate_replica_ready", "no series has ['replica']"),
        ("kvgate_replica_ready * kvgate_replica_info", "its sides match on no labels"),
        ("sum(rate(kvgate_prompt_tokens_total[1m])", "unclosed|invalid|unexpected"),
    ],
)
def test_a_query_that_is_wrong_is_found(known: Mapping[str, Labels], expr: str, wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError)) as found:
        result_labels(expr, known)
    assert any(each in str(found.value) for each in wrong.split("|")), found.value


@needs("prometheus")
def test_prometheus_answers_every_panel_with_data(prometheus: Prometheus) -> None:
    def without_data() -> list[str]:
        return [f"{panel}: {expr}" for panel, expr, _ in panel_queries() if not prometheus.series(expr)]

    def all_but_alerts() -> bool:
        return all("ALERTS" in query for query in without_data())

    wait_until(all_but_alerts, 30)


@needs("prometheus")
def test_prometheus_has_values_for_every_variable(prometheus: Prometheus) -> None:
    for variable, selector, label in variable_queries():
        parameters: Any = {"match[]": selector}
        assert prometheus.ask(f"label/{label}/values", **parameters), variable


@needs("prometheus")
def test_prometheus_evaluates_every_rule_and_no_alert_fires_on_a_cluster_that_is_well(prometheus: Prometheus) -> None:
    def evaluated() -> list[Any]:
        found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = wait_until(evaluated)
    assert len(found) == len(rules())
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    states = {rule["name"]: rule["state"] for rule in found if rule["type"] == "alerting"}
    assert len(states) == len(alerts())
    assert [name for name, state in states.items() if state == "firing"] == []
