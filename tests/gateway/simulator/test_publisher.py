"""The wire format: numbers, replays, versions, and the effect of faults on batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.agent.kv_events import Stored, decode
from gateway.ops.local.ports import free_ports
from tests.gateway.simulator.conftest import RunningReplica, StartPublishing, StartReplica, cached_tokens_of, join
from tests.gateway.simulator.subscription import END, subscribed
from tests.gateway.simulator.test_events import complete, ids, stored


async def publish(replica: RunningReplica, *numbers: int) -> None:
    """Publishes one batch for each number, with its own block. The block's first token is 16 times the number."""
    for number in numbers:
        await complete(replica, ids(16 * number, 16))


def number_of(payload: bytes) -> int:
    (event,) = decode(payload).events
    assert isinstance(event, Stored)
    return event.tokens[0] // 16


async def fail(replica: RunningReplica, mode: str, count: int = 1) -> None:
    assert (await replica.post("/sim/fail", {"mode": mode, "count": count}))[0] == 200


async def test_batches_are_numbered_from_0_in_each_process_and_a_replay_begins_where_it_is_told(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing()
    await publish(replica, 1, 2, 3)
    everything = await subscription.replay()
    assert [message.seq for message in everything] == list(range(len(everything)))
    assert [number_of(message.payload) for message in everything[-3:]] == [1, 2, 3]
    assert await subscription.replay(len(everything) - 1) == everything[-1:]
    assert await subscription.replay(len(everything) + 5) == []


async def test_a_replay_has_the_frames_of_live_batches_and_ends_with_minus_one(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing()
    await publish(replica, 1)
    message = await subscription.live()
    assert message.frames[0] == b"kv"
    assert [len(frame) for frame in message.frames[:2]] == [2, 8]
    await subscription.ask(b"", message.seq.to_bytes(8, "big"))
    assert (await subscription.reply()).frames == [b"", *message.frames]
    assert (await subscription.reply()).frames == [b"", b"", END, b""]


async def test_a_replay_has_no_more_than_the_last_batches(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(replay_steps=3)
    await publish(replica, *range(1, 6))
    assert [number_of(message.payload) for message in await subscription.replay()] == [3, 4, 5]


async def test_a_replay_longer_than_a_burst_is_whole_though_the_engine_runs_on(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing()
    await publish(replica, *range(1, 101))
    replayed, _ = await asyncio.gather(subscription.replay(), publish(replica, *range(101, 111)))
    numbers = [number_of(message.payload) for message in replayed[-100:]]
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    assert numbers[-1] >= 100


async def test_a_request_for_a_replay_that_is_none_gets_no_answer(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing()
    await publish(replica, 1)
    await subscription.ask(bytes(8))
    await subscription.ask(b"", bytes(8), b"too much")
    assert len(await subscription.replay()) > 0


async def test_the_sources_are_told_in_vllms_shape_with_the_ports_that_were_bound(start_replica: StartReplica) -> None:
    live_port, replay_port = free_ports(2)
    replica = await start_replica(events_port=live_port, replay_port=replay_port, replay_steps=7)
    assert await replica.get("/kv_event_sources") == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{live_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
            "buffer_steps": 7,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "kv",
        }
    }


async def test_without_a_ring_there_is_no_replay_endpoint_and_without_events_there_is_no_source(
    start_replica: StartReplica,
) -> None:
    ringless = await start_replica(replay_steps=0)
    assert (await ringless.get("/kv_event_sources"))["0"]["replay_endpoint"] is None
    silent = await start_replica(events=False)
    assert await silent.get("/kv_event_sources") == {}
    await silent.chat("still answers")


async def raw_event(start_replica: StartReplica, version: str, **body: Any) -> list[Any]:
    """The events of a hit on a cached prompt, from a request with a session and a full report, at the given version."""
    port, replay_port = free_ports(2)
    replica = await start_replica(vllm_version=version, events_port=port, replay_port=replay_port)
    assert (await replica.get("/version"))["version"] == version
    with subscribed(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}") as subscription:
        await join(replica, subscription)
        for _ in range(2):
            await complete(replica, ids(1, 18), session_id="s", vllm_xargs={"kv_cache_report_mode": "full"})
        return [event for message in await subscription.new() for event in message.raw]


async def test_before_0_30_events_have_no_session(start_replica: StartReplica) -> None:
    assert ["session_id" in event for event in await raw_event(start_replica, "0.29.3")] == [False, False]
    assert ["session_id" in event for event in await raw_event(start_replica, "0.30.0")] == [True, True]


async def test_before_0_32_the_sources_are_not_told(start_replica: StartReplica) -> None:
    for version, status in (("0.31.9", 404), ("0.32.0", 200), ("1.0", 200)):
        replica = await start_replica(vllm_version=version)
        async with replica.http.get("/kv_event_sources") as response:
            assert response.status == status


@pytest.mark.parametrize(
    ("fault", "count", "live", "replayed"),
    [
        ("drop_events", 2, [3, 4], [1, 2, 3, 4]),
        ("lose_events", 1, [2, 3, 4], [2, 3, 4]),
        ("duplicate_events", 1, [1, 1, 2, 3, 4], [1, 2, 3, 4]),
        ("delay_events", 2, [2, 1, 4, 3], [1, 2, 3, 4]),
    ],
)
async def test_a_fault_changes_what_subscribers_get_of_the_batches_and_what_replays_have(
    start_publishing: StartPublishing, fault: str, count: int, live: list[int], replayed: list[int]
) -> None:
    replica, subscription = await start_publishing()
    before = len(await subscription.replay())
    await fail(replica, fault, count)
    await publish(replica, 1, 2, 3, 4)
    messages = [await subscription.live() for _ in live]
    assert [number_of(message.payload) for message in messages] == live
    assert [message.seq - before + 1 for message in messages] == live
    assert [number_of(message.payload) for message in await subscription.replay(before)] == replayed
    assert not await subscription.poll()


async def test_amnesia_forgets_the_idle_blocks_and_tells_nobody(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing()
    await publish(replica, 1, 2)
    await subscription.new()
    await fail(replica, "amnesia")
    assert (await replica.state())["block_hashes"] == 0
    assert (await replica.state())["failing"] == []
    assert await subscription.new() == []
    answer = await complete(replica, ids(16, 18))
    assert cached_tokens_of(answer) == 0
    assert len(stored(await subscription.new_events())) == 1
