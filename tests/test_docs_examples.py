"""The complete examples of documents, typed as they stand. (Others are in tests/browser and tests/fit.)"""

from __future__ import annotations

from pathlib import Path

from gateway.ops.local.ports import free_ports
from tests.documents import example, typing
from tests.programs import needs
from tests.redis_server import running_redis


@needs("openssl", "curl")
def test_a_gateway_with_tls(tmp_path: Path) -> None:
    replica, gateway = map(str, free_ports(2))
    with running_redis() as store:
        ports = {"8000": replica, "8080": gateway, "6379": str(store.port)}
        *typed, end = example("tls.md", "An example", ports)
        with typing(tmp_path, typed, [end]) as printed:
            assert '"ready":true' in printed
            assert "0 requests waiting\nreplica" in printed
