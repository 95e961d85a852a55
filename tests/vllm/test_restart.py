"""A real engine is killed under load and comes back. Only its streams break, and the map drops its old prompts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from bench.vllm.replicas import BLOCK_TOKENS, VllmCluster, VllmReplica
from tests.cluster.clients import HeldStream, last_event
from tests.polling import eventually
from tests.vllm.clients import BROKEN, CLIENTS, Client, Crowd, busy_crowd
from tests.vllm.streams import is_ready, streams_up_to_one_of
from tests.vllm.workload import Messages, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BACK_WITHIN_S = 30.0


async def test_an_engine_killed_under_load_loses_its_streams_and_what_it_held(
    gateways: list[Client], cluster: VllmCluster
) -> None:
    victim = cluster.replicas[0]
    lost = await _held_by(victim, gateways)
    life = await _incarnation(gateways[0], lost[0], victim)
    async with busy_crowd(gateways, seed=11) as crowd, AsyncExitStack() as stack:
        streams = await streams_up_to_one_of(victim, stack, gateways)
        await victim.restart()
        answered = len(crowd.replies)
        await _look_at_the_ends(streams, victim)
        await eventually(lambda: is_ready(victim, gateways), within_s=BACK_WITHIN_S)
        await eventually(lambda: _was_used(crowd, victim, since=answered), within_s=60)

    _look_at_the_answers(crowd, victim)
    for gateway in gateways:
        for messages in lost:
            assert await _owners(gateway, messages, victim) == []
    for number, messages in enumerate(lost):
        reply = await gateways[number % 2].ask(messages, max_tokens=1)
        assert max(reply.matched_tokens, reply.cached_tokens) < BLOCK_TOKENS, reply
    held = await _held_by(victim, gateways, series="after")
    assert await _incarnation(gateways[1], held[0], victim) != life


async def _look_at_the_ends(streams: list[HeldStream], victim: VllmReplica) -> None:
    """The dead engine's stream ends with an error; the others are whole."""
    ends = [(stream.replica, await stream.rest()) for stream in streams]
    broken = [last_event(text)["error"]["code"] for replica, text in ends if replica == victim.id]
    assert broken == [BROKEN]
    assert all(text.endswith("data: [DONE]\n\n") for replica, text in ends if replica != victim.id)


def _look_at_the_answers(crowd: Crowd, victim: VllmReplica) -> None:
    """Only streams of the dead engine failed. The other engine answered the requests that were not streamed."""
    errors = [(ask, reply) for ask, reply in crowd.replies if reply.error]
    print(f"\n{len(crowd.replies)} requests while {victim.id} died and came back, {len(errors)} of them broken streams")
    assert crowd.failures == []
    assert [pair for pair in errors if pair[1].error != BROKEN] == []
    assert {reply.replica for _, reply in errors} <= {victim.id}
    assert len(errors) <= CLIENTS


async def _held_by(victim: VllmReplica, gateways: list[Client], series: str = "before") -> list[Messages]:
    """Prompts that were served and are resident on the victim, and nowhere else."""
    held = []
    for number in range(8):
        messages: Messages = [{"role": "user", "content": text(f"{series} the engine died, {number}", 2500)}]
        reply = await gateways[number % 2].ask(messages, max_tokens=1, policy="round_robin")
        if reply.replica == victim.id:
            await gateways[1 - number % 2].until_found(messages, reply)
            held.append(messages)
    assert held
    return held


async def _owners(gateway: Client, messages: Messages, replica: VllmReplica) -> list[Any]:
    """The map's records of this replica's current life for any prefix of the prompt."""
    chain = (await gateway.explain(messages))["chain"]
    return [one for link in chain for one in link["owners"] if one["replica"] == replica.id and not one["stale"]]


async def _incarnation(gateway: Client, messages: Messages, replica: VllmReplica) -> str:
    incarnation: str = (await _owners(gateway, messages, replica))[-1]["incarnation"]
    return incarnation


def _was_used(crowd: Crowd, replica: VllmReplica, since: int) -> bool:
    return sum(reply.replica == replica.id and not reply.error for _, reply in crowd.replies[since:]) > 5
