"""The complete examples of documents, typed as they stand. (Others are in tests/browser and tests/fit.)"""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from gateway.ops.cli import app
from gateway.ops.local.ports import free_ports
from tests.documents import ROOT, blocks, example, typing
from tests.programs import needs


@needs("openssl", "curl", "redis-server")
def test_a_gateway_with_tls(tmp_path: Path) -> None:
    replica, gateway, store = map(str, free_ports(3))
    *typed, end = example("how-to/tls.md", "An example", {"8000": replica, "8080": gateway, "6379": store})
    with typing(tmp_path, typed, [end]) as printed:
        assert '"ready":true' in printed
        assert "0 requests waiting\nreplica" in printed


def test_the_readmes_configuration_has_ten_lines_and_nothing_to_warn_of(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "README.md").read_text(), "yaml")
    assert len(block.splitlines()) == 10
    file = tmp_path / "gateway.yaml"
    file.write_text(block)
    checked = CliRunner().invoke(app, ["check-config", "--strict", str(file)])
    assert checked.exit_code == 0, checked.output
    assert "2 replicas" in checked.output
