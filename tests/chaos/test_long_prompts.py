"""A prompt that keeps a server's event loop busy takes no fleet down."""

from __future__ import annotations

from typing import Any

from tests.chaos.stage import Stage
from tests.chaos.test_dead_hosts import PATIENT, are
from tests.chaos.test_sleeping_replicas import READY
from tests.cluster.clients import Load, ask, running_load
from tests.cluster.gateways import another_gateway
from tests.polling import eventually

LONG_BYTES = 60_000
BUSY_S = 7


async def test_a_prompt_that_keeps_servers_busy_ends_after_the_second_and_all_else_is_answered(stage: Stage) -> None:
    """A server that computes it answers nothing for so long that it counts as dead. It is well again then."""
    before = await times_busy(stage)
    await stage.fail_everywhere("block", seconds=BUSY_S, over_bytes=LONG_BYTES, count=-1)
    async with (
        another_gateway(stage.cluster, "patient", **PATIENT) as gateway,
        another_gateway(stage.cluster, "other", **PATIENT) as other,
        running_load(Load(stage.http, [gateway.url, other.url]), clients=2) as load,
    ):
        refused = await ask(stage.http, gateway.url, "word " * (LONG_BYTES // 5), stream=True)
        error: dict[str, Any] = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "prompt_stalls_replicas"), error
        assert refused.headers["x-should-retry"] == "false"
    assert load.failures == []
    assert load.answered > 0
    assert await times_busy(stage) - before == 2
    assert await stage.ledger.breakers() == {}
    await eventually(lambda: are(stage, READY))


async def times_busy(stage: Stage) -> int:
    """How many times a prompt has kept a server busy."""
    return sum([(await stage.replica_state(replica))["blocked"] for replica in stage.cluster.replicas])
