"""Panels and dashboards, and their JSON for Grafana (11 and newer)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "table", "state-timeline", "heatmap"]

_WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA = 39
_OPTIONS: Mapping[Kind, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
    "table": {"showHeader": True, "cellHeight": "sm"},
    "state-timeline": {
        "showValue": "never",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
    },
    "heatmap": {"calculate": False, "yAxis": {"unit": "s"}, "color": {"mode": "scheme", "scheme": "Blues"}},
}


@dataclass(frozen=True)
class Query:
    """PromQL, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """`text` explains the panel and says what a good value is. `states` has the name and colour of each value."""

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    max: float | None = None
    good_from: float | None = None
    good_to: float | None = None
    states: Mapping[int, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A selection of one or several values of a label; all of them by default."""

    name: str
    metric: str
    label: str

    def form(self) -> Json:
        query = f"label_values({self.metric}, {self.label})"
        return {
            "name": self.name,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": self.name},
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "refresh": 2,
            "sort": 1,
        }


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    def form(self) -> Json:
        datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1}
        return {
            "uid": self.uid,
            "title": f"KVGate / {self.title}",
            "description": self.text,
            "tags": ["kvgate"],
            "schemaVersion": _SCHEMA,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "links": [
                {
                    "type": "dashboards",
                    "title": "KVGate",
                    "tags": ["kvgate"],
                    "includeVars": True,
                    "keepTime": True,
                    "asDropdown": False,
                }
            ],
            "annotations": {"list": [_alerts()]},
            "templating": {"list": [datasource, *(variable.form() for variable in self.variables)]},
            "panels": list(_laid_out(self.rows)),
        }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Kvgate.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{replica}} {{condition}} {{instance}}",
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    """Places panels from left to right, and starts a new line when one does not fit."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, number: int, place: Json) -> Json:
    form: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "gridPos": place,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
    }
    if panel.kind == "table":  # a column for each query, a line for each set of common labels
        names = {f"Value #{chr(ord('A') + i)}": query.legend for i, query in enumerate(panel.queries)}
        form["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ]
    return form


def _field(panel: Panel) -> Json:
    field: Json = {"unit": panel.unit, "min": 0}
    if panel.max is not None:
        field["max"] = panel.max
    if panel.kind == "timeseries":
        field["custom"] = {"fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
        if panel.stacked:
            field["custom"]["stacking"] = {"mode": "normal", "group": "A"}
    steps: list[Json] = [{"value": None, "color": "red" if panel.good_from is not None else "green"}]
    if panel.good_from is not None:
        steps.append({"value": panel.good_from, "color": "green"})
    if panel.good_to is not None:
        steps.append({"value": panel.good_to, "color": "red"})
    field["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.states is not None:
        names = {str(value): {"text": name, "color": color} for value, (name, color) in panel.states.items()}
        field["mappings"] = [{"type": "value", "options": names}]
    return field


def _target(panel: Panel, query: Query, ref: str) -> Json:
    target: Json = {"refId": ref, "expr": query.expr, "legendFormat": query.legend or "__auto"}
    if panel.kind == "table":
        target |= {"format": "table", "instant": True}
    elif panel.kind == "heatmap":
        target |= {"format": "heatmap"}
    return target
