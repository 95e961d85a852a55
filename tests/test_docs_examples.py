"""The complete examples of documents, typed as they stand. (Others are in tests/browser and tests/fit.)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.ops.cli import app
from gateway.ops.local.ports import free_ports
from gateway.settings.gateway_settings import GatewaySettings
from tests.documents import ROOT, blocks, example, section, typing
from tests.programs import needs


@needs("openssl", "curl", "redis-server")
def test_a_gateway_with_tls(tmp_path: Path) -> None:
    replica, gateway, store = map(str, free_ports(3))
    *typed, end = example("how-to/tls.md", "An example", {"8000": replica, "8080": gateway, "6379": store})
    with typing(tmp_path, typed, [end]) as printed:
        assert '"ready":true' in printed
        assert "0 requests waiting\nreplica" in printed


AT_ONCE = """told=$((told + 2)); kill -HUP $(grep -oP 'gateway gw.* pid \\K\\d+' printed.txt)
  until [ $(cat .kvgate/logs/gw*.log | grep -c 'configuration read again') -ge $told ]; do sleep 0.05; done"""
"""In place of a wait for two gateways to look at their file: they are told."""


@needs("curl")
def test_a_version_of_a_model_is_rolled_out_and_back_and_the_counts_are_those_of_the_page(tmp_path: Path) -> None:
    v1, v2, gateways = map(str, free_ports(3))
    ports = {"8001": v1, "8002": v2, "8080": gateways, "sleep 3": AT_ONCE}
    *typed, down, kill = example("models.md", "Roll out a version", ports)
    counts = re.compile(r"^ +(\d+) x-kvgate-replica: (v\d)\b", flags=re.MULTILINE)
    expected = counts.findall(section("models.md", "Roll out a version"))
    assert len(expected) > 9
    with typing(tmp_path, typed, [down, kill]) as printed:
        assert counts.findall(printed) == expected


@needs("curl")
def test_a_fallback_answers_as_the_page_of_models_shows(tmp_path: Path) -> None:
    small, gateways = map(str, free_ports(2))
    *typed, down, kill = example("models.md", "Fall back to another model", {"8003": small, "8080": gateways})
    with typing(tmp_path, typed, [down, kill]) as printed:
        for answer in ("x-kvgate-model: small", '"answered_by_fallback":{"big":["small"]'):
            assert answer in section("models.md", "Fall back to another model")
            assert answer in printed


@needs("curl")
def test_the_bill_of_two_tenants_is_that_of_the_page(tmp_path: Path) -> None:
    (port,) = map(str, free_ports(1))
    *typed, down = example("usage.md", "One example", {"8080": port})
    lines = re.compile(r"^(?:20\d\d-\d\d(?P<month>\W.*)|(?P<other>time\W.*|total .*))$", flags=re.MULTILINE)
    expected = [found["month"] or found["other"] for found in lines.finditer(section("usage.md", "One example"))]
    assert len(expected) == 12
    with typing(tmp_path, typed, [down]) as printed:
        assert [found["month"] or found["other"] for found in lines.finditer(printed)] == expected


PID_OF_IT = (
    r"""$(kvgate status | awk -v id=$(sed -n 's/^x-kvgate-replica: \(r.\).*/\1/p' head.txt) '$2 == id { print $4 }')"""
)


@needs("curl")
def test_a_stream_goes_on_and_is_explained_as_the_page_shows(tmp_path: Path) -> None:
    (port,) = map(str, free_ports(1))
    instead = {"up --detach ": f"up --detach --port {port} ", "8080": port, "29488": PID_OF_IT, "3000": "600"}
    *typed, down = example("resuming.md", "See it", instead)
    with typing(tmp_path, typed, [down]) as printed:
        assert ": x-kvgate-resumed: 1; exact\n\ndata: [DONE]\n" in printed
        assert re.search(
            r"^began at (r\d), which broke it off \(reset\); went on at r\d \(exact\)$", printed, re.MULTILINE
        )


@pytest.mark.parametrize(("document", "most_lines"), [("README.md", 10), ("docs/how-to/migrate.md", 17)])
def test_a_whole_configuration_is_short_and_there_is_nothing_to_warn_of(
    document: str, most_lines: int, tmp_path: Path
) -> None:
    (block,) = blocks((ROOT / document).read_text(), "yaml")
    assert len(block.splitlines()) <= most_lines
    file = tmp_path / "gateway.yaml"
    file.write_text(block)
    checked = CliRunner().invoke(app, ["check-config", "--strict", str(file)])
    assert checked.exit_code == 0, checked.output
    assert "2 replicas" in checked.output


def test_every_setting_that_the_page_for_migrants_names_exists() -> None:
    schema = GatewaySettings.model_json_schema()
    named = re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)\b", (ROOT / "docs/how-to/migrate.md").read_text())
    settings = [each for each in named if each.split(".")[0].removesuffix("[]") in schema["properties"]]
    assert len(settings) > 40
    for each in settings:
        part: Any = schema
        for name in each.replace("[]", "").split("."):
            kinds = [part, *part.get("anyOf", ()), part.get("items", {})]
            kinds = [schema["$defs"][kind["$ref"].split("/")[-1]] if "$ref" in kind else kind for kind in kinds]
            part = next((kind["properties"][name] for kind in kinds if name in kind.get("properties", ())), None)
            assert part is not None, each
