"""The dashboards' files match their description and Grafana's own types, and Compose mounts them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.__main__ import files
from tests.deploy.queries import DASHBOARDS, ROOT, dashboard

# Fields of Prometheus' annotations: Grafana's types leave them to the data source.
NOT_TYPED = {"/annotations/list/0/titleFormat", "/annotations/list/0/textFormat"}

each_dashboard = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)


def test_the_files_are_what_is_described() -> None:
    for file, text in files():
        assert file.read_text() == text, "run: python -m deploy.grafana"
    assert sorted(file for file, _ in files()) == DASHBOARDS


@each_dashboard
def test_every_field_is_one_that_grafana_knows(file: Path) -> None:
    register_default_plugins()
    written = dashboard(file)
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(written)))
    assert set(lost(written, read)) == NOT_TYPED


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths at which `read` differs from `written`. Fields only in `read` are defaults and do not count."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from lost(value, read.get(name), f"{path}/{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(one, other, f"{path}/{index}")
    elif written != read:
        yield path


@each_dashboard
def test_every_panel_says_what_one_sees_and_has_a_place_of_its_own(file: Path) -> None:
    panels = dashboard(file)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        places.update((place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"]))
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    assert max(places.values()) == 1


@each_dashboard
def test_every_variable_is_used_and_none_is_missing(file: Path) -> None:
    board = dashboard(file)
    there = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps([board["panels"], board["annotations"], board["templating"]])
    assert set(re.findall(r"\$\{?(?!__)(\w+)", text)) == there


def test_compose_gives_grafana_what_its_provisioning_names() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    mounted = {target: ROOT / source for source, target, _ in (each.split(":") for each in service["volumes"])}
    provisioning = mounted["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvgate.yaml").read_text())["providers"]
    assert sorted(mounted[provider["options"]["path"]].glob("*.json")) == DASHBOARDS
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name) in DASHBOARDS
