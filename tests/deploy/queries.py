"""The queries of dashboards and rules, and a check that the metrics and labels in them exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules" / "kvgate.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
ADAPTER = ROOT / "deploy" / "kubernetes" / "autoscaling" / "hpa" / "adapter.yaml"
WINDOW = "1m"

Labels = frozenset[str]
_TARGET: Labels = frozenset({"job", "instance"})
"""The labels that Prometheus adds to every series that it scrapes."""
OTHERS: Mapping[str, Labels] = {
    "up": _TARGET,
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "job", "instance", "replica", "condition", "pool"}),
}
"""Prometheus' own metrics."""


def dashboard(file: Path) -> Any:
    return json.loads(file.read_text())


def rules() -> list[Any]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Any]:
    return [rule for rule in rules() if "alert" in rule]


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """Each panel, its PromQL as Grafana fills it in for the choice of all values, and its legend."""
    for file in DASHBOARDS:
        board = dashboard(file)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{board['title']}: {panel['title']}", filled_in(target["expr"]), target["legendFormat"]
        for annotation in board["annotations"]["list"]:
            yield f"{board['title']}: {annotation['name']}", annotation["expr"], annotation["textFormat"]


def variable_queries() -> Iterator[tuple[str, str, str]]:
    """Each variable, the selector of the series with its values, and their label."""
    for file in DASHBOARDS:
        board = dashboard(file)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert found, variable
                yield f"{board['title']}: {variable['name']}", filled_in(found[1]), found[2]


def adapters_query() -> str:
    """The PromQL of the rule for prometheus-adapter, as the adapter fills it in for a pool, but without the
    namespace, which Prometheus adds in Kubernetes."""
    (rule,) = yaml.safe_load(ADAPTER.read_text())["externalRules"]
    query: str = rule["metricsQuery"]
    return query.replace("<<.LabelMatchers>>", 'pool="sim"')


def filled_in(expr: str) -> str:
    expr = expr.replace("$__rate_interval", WINDOW)
    return re.sub(r"\$\w+", ".+", expr)


def templated_labels(text: str) -> set[str]:
    """The labels that a legend or an alert's annotation shows."""
    return set(re.findall(r"{{\s*(?:\$labels\.)?([a-z]\w*)\s*}}", text))


def result_labels(expr: str, known: Mapping[str, Labels]) -> Labels:
    """The labels that a query's result can have. Fails if the query names a metric or label that does not exist."""
    return _labels(promql.parse(expr), known)


def _labels(expr: Any, known: Mapping[str, Labels]) -> Labels:
    match expr:
        case promql.VectorSelector():
            assert expr.name in known, f"no metric is called {expr.name}"
            labels = known[expr.name] | _TARGET
            _require({matcher.name for matcher in expr.matchers.matchers}, labels, expr)
            return labels
        case promql.MatrixSelector():
            return _labels(expr.vector_selector, known)
        case promql.AggregateExpr():
            inner = _labels(expr.expr, known)
            if expr.modifier is None:
                return frozenset()
            assert expr.modifier.type == promql.AggModifierType.By, "only `by` says which labels are left"
            _require(set(expr.modifier.labels), inner, expr)
            return frozenset(expr.modifier.labels)
        case promql.Call():
            inner = frozenset().union(*(_labels(each, known) for each in expr.args))
            dropped = {"histogram_quantile": frozenset({"le"}), "scalar": inner, "absent": inner}
            return inner - dropped.get(expr.func.name, frozenset())
        case promql.BinaryExpr():
            return _matched(expr, _labels(expr.lhs, known), _labels(expr.rhs, known))
        case promql.ParenExpr():
            return _labels(expr.expr, known)
        case promql.NumberLiteral():
            return frozenset()
    raise AssertionError(f"a form that is not known here: {expr}")


def _matched(expr: Any, left: Labels, right: Labels) -> Labels:
    modifier = expr.modifier
    if modifier is not None and modifier.matching is not None:
        on = set(modifier.matching.labels)
        _require(on, left, expr)
        _require(on, right, expr)
        return left | set(modifier.group_labels or ())
    assert left == right or _is_number(expr.lhs) or _is_number(expr.rhs), f"its sides match on no labels: {expr}"
    return left | right


def _is_number(expr: Any) -> bool:
    is_scalar = isinstance(expr, promql.Call) and expr.func.name == "scalar"
    return is_scalar or isinstance(expr, promql.NumberLiteral)


def _require(wanted: set[str], there: Labels, expr: Any) -> None:
    assert wanted <= there, f"no series has {sorted(wanted - there)} in: {expr}"
