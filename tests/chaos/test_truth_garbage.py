"""A foreign client writes garbage into the store: no process stops, and every record becomes right again."""

from __future__ import annotations

import re

from coordinator.keys import PoolKeys
from tests.chaos.test_redis_loss import served
from tests.chaos.truth_stage import TruthStage
from tests.cluster.clients import Load, running_load
from tests.polling import eventually


def garbage(keys: PoolKeys) -> dict[str, tuple[str, str]]:
    """For each key, a field and the garbage for it."""
    return {
        keys.active: ("r1", ""),
        keys.owned_tokens: ("r1", "x"),
        keys.backlog_tokens: ("r2", "nan"),
        keys.agents: ("r0", "garbage"),
        keys.entries: ("r2", ""),
        keys.replicas: ("r1", "\x00"),
    }


async def agents(truth: TruthStage) -> dict[str, str]:
    """The agent process of each replica."""
    return {name: text.split(" ")[0] for name, text in (await truth.client.hgetall(truth.keys.agents)).items()}


async def has_right_sums(truth: TruthStage) -> bool:
    """Whether all sums are readable, and equal those of the requests in flight."""
    try:
        return not (await truth.ledger.sums()).problems()
    except ValueError:
        return False


async def test_garbage_under_load_fails_no_request_and_all_is_exact_again(truth: TruthStage) -> None:
    known = await truth.warm(3)
    before = await agents(truth)
    async with running_load(Load(truth.http, truth.urls)) as load:
        await served(load, "exact")
        for key, (field, value) in garbage(truth.keys).items():
            name = key.rpartition(":")[2]
            await truth.client.hset(key, field, value)
            await eventually(lambda name=name: truth.client.hexists(truth.keys.unreadable, name))
            await eventually(lambda: has_right_sums(truth))
            await eventually(truth.is_exact_everywhere)
            await served(load, "exact")
    assert load.failures == []
    assert await agents(truth) == before
    await truth.settle(known)
    exposed = "".join([(await truth.http.get(f"{url}/metrics")).text for url in truth.urls])
    for key in garbage(truth.keys):
        name = re.escape(key.rpartition(":")[2])
        assert re.search(rf'^kvgate_unreadable_records_total{{key="{name}"}} [1-9]', exposed, re.MULTILINE), name
