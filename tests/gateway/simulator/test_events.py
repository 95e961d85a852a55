"""The KV events of each change to the cache, over a real subscription."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from coordinator.agent.kv_events import Cleared, Event, Removed, Stored
from tests.gateway.simulator.conftest import RunningReplica, StartPublishing, StartReplica, cached_tokens_of

_SMALL = {"block_size": 4, "num_gpu_blocks": 8, "max_num_batched_tokens": 32}


async def complete(replica: RunningReplica, prompt: Any, max_tokens: int = 1, **body: Any) -> dict[str, Any]:
    request = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, **body}
    status, answer = await replica.post("/v1/completions", request)
    assert status == 200, answer
    return answer


def ids(first: int, count: int) -> list[int]:
    """A prompt of token ids. It shares no block with a prompt that starts with another id."""
    return list(range(first, first + count))


def stored(events: list[Event]) -> list[Stored]:
    return [event for event in events if isinstance(event, Stored)]


def removed(events: list[Event], medium: str = "gpu") -> list[list[int]]:
    return [event.hashes for event in events if isinstance(event, Removed) and event.medium == medium]


def gpu(events: list[Event]) -> list[Stored]:
    return [event for event in stored(events) if event.medium == "gpu"]


def cpu(events: list[Event]) -> list[Stored]:
    return [event for event in stored(events) if event.medium == "cpu"]


async def test_each_prefill_chunk_is_one_event_in_a_batch_of_its_own(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(**{**_SMALL, "num_gpu_blocks": 64})
    prompt = ids(1, 70)
    await complete(replica, prompt, session_id="tip")
    batches = [message.batch for message in await subscription.new()]
    chunks = [event for batch in batches for event in stored(batch.events)]
    assert [len(batch.events) for batch in batches] == [1, 1, 1]
    assert [len(chunk.hashes) for chunk in chunks] == [8, 8, 1]
    assert [chunk.parent for chunk in chunks] == [None, chunks[0].hashes[-1], chunks[1].hashes[-1]]
    assert [token for chunk in chunks for token in chunk.tokens] == prompt[:68]
    assert {(chunk.session, chunk.block_size, chunk.group, chunk.medium) for chunk in chunks} == {("tip", 4, 0, "gpu")}
    assert [chunk.extra for chunk in chunks] == [[None] * 8, [None] * 8, [None]]
    assert [earlier.ts <= later.ts for earlier, later in pairwise(batches)] == [True, True]


async def test_a_block_that_decoding_fills_is_an_event_with_the_generated_tokens(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    answer = await complete(replica, ids(1, 6), max_tokens=4, return_token_ids=True)
    prefilled, decoded = stored(await subscription.new_events())
    assert decoded.parent == prefilled.hashes[-1]
    assert len(decoded.hashes) == 1
    assert decoded.tokens == [5, 6, *answer["choices"][0]["token_ids"][:2]]


async def test_evictions_are_one_event_each_the_deepest_block_first_and_before_what_needed_the_room(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    await complete(replica, ids(1, 16))
    (first,) = stored(await subscription.new_events())
    await complete(replica, ids(100, 24))
    events = await subscription.new_events()
    assert removed(events) == [[first.hashes[3]], [first.hashes[2]]]
    assert isinstance(events[-1], Stored)


async def test_a_last_block_that_did_not_get_full_makes_room_before_anything_is_evicted(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    await complete(replica, ids(1, 16))
    await complete(replica, ids(100, 10))
    await subscription.new_events()
    await complete(replica, ids(200, 8))
    assert removed(await subscription.new_events()) == []


async def test_two_equal_prompts_in_one_step_store_their_last_block_twice_and_evict_it_twice(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    await complete(replica, [ids(1, 16), ids(1, 16)])
    (message,) = await subscription.new()
    first, second = stored(message.batch.events)
    assert second.hashes == first.hashes[3:]
    assert second.parent == first.hashes[2]
    await complete(replica, ids(100, 31))
    evicted = removed(await subscription.new_events())
    assert sorted(evicted) == sorted([[each] for each in (*first.hashes, *second.hashes)])
    assert evicted.count([first.hashes[3]]) == 2


async def test_nothing_is_told_of_a_hit_unless_a_full_report_is_asked_for(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    prompt = ids(1, 18)
    await complete(replica, prompt)
    (fresh,) = stored(await subscription.new_events())
    await complete(replica, prompt)
    assert await subscription.new() == []
    await complete(replica, prompt, session_id="asks", vllm_xargs={"kv_cache_report_mode": "full"})
    (report,) = stored(await subscription.new_events())
    assert (report.hashes, report.parent, report.tokens) == (fresh.hashes, None, prompt[:16])
    assert report.session == "asks"


async def test_a_reset_is_told_with_the_next_step_and_before_what_that_step_stores(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(**_SMALL)
    await complete(replica, ids(1, 16))
    await subscription.new()
    assert (await replica.post("/reset_prefix_cache", {}))[1] == {"reset": True}
    assert await subscription.new() == []
    await complete(replica, ids(1, 16))
    (message,) = await subscription.new()
    assert message.batch.events[0] == Cleared()
    assert [len(event.hashes) for event in stored(message.batch.events)] == [4]


async def test_a_reset_that_is_refused_is_not_told(start_replica: StartReplica) -> None:
    replica = await start_replica(speed=0.001)
    stream = {"model": "sim", "prompt": "hello", "stream": True}
    async with replica.http.post("/v1/completions", json=stream):
        await replica.until(lambda state: state["blocks_used"] > 0)
        assert (await replica.post("/reset_prefix_cache", {}))[1] == {"reset": False}


async def test_each_rank_publishes_its_own_cache_under_its_own_number(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(data_parallel=2, **_SMALL)
    sources = await replica.get("/kv_event_sources")
    assert list(sources) == ["0", "1"]
    assert len({source[name] for source in sources.values() for name in ("endpoint", "replay_endpoint")}) == 4
    await replica.post("/v1/completions", {"model": "sim", "prompt": ids(1, 8)}, **{"X-data-parallel-rank": "1"})
    assert await subscription.new() == []
    await replica.post("/v1/completions", {"model": "sim", "prompt": ids(1, 8)}, **{"X-data-parallel-rank": "0"})
    assert {message.rank for message in await subscription.new()} == {0}


async def test_a_lora_adapter_is_named_and_enters_each_block(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(adapters=("tuned",), **_SMALL)
    await complete(replica, ids(1, 8), model="tuned")
    (message,) = await subscription.new()
    (event,) = message.raw
    assert (event["lora_id"], event["lora_name"], event["extra_keys"]) == (1, "tuned", [["tuned"], ["tuned"]])


async def test_a_block_on_the_gpu_is_copied_to_the_cpu_tier_one_step_later(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(cpu_blocks=32, **_SMALL)
    await complete(replica, ids(1, 16), max_tokens=8)
    await replica.until(lambda state: state["cpu_blocks"] >= 4)
    messages = await subscription.new()
    events = [event for message in messages for event in message.batch.events]
    (fresh, *_), copies = gpu(events), cpu(events)
    assert [copy.hashes for copy in copies] == [[each] for each in fresh.hashes]
    assert [copy.parent for copy in copies] == [None, *fresh.hashes[:3]]
    assert [token for copy in copies for token in copy.tokens] == ids(1, 16)
    assert {(copy.session, copy.extra) for copy in copies} == {(None, None)}
    assert not cpu(messages[0].batch.events)
    assert len(gpu(events)) > 1, "what decoding filled is on the GPU only"


async def test_what_only_the_cpu_tier_has_is_loaded_and_counts_as_cached(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing(cpu_blocks=32, **_SMALL)
    prompt = ids(1, 18)
    await complete(replica, prompt)
    await complete(replica, ids(100, 31))
    await replica.until(lambda state: state["cpu_blocks"] == 11)
    (fresh, _) = gpu(await subscription.new_events())
    answer = await complete(replica, prompt)
    assert cached_tokens_of(answer) == 16
    assert gpu(await subscription.new_events())[0].hashes == fresh.hashes
    async with replica.http.get("/metrics") as response:
        assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="sim"} 16.0' in await response.text()


async def test_the_cpu_tier_drops_the_least_recently_used_deepest_first_in_one_event(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(cpu_blocks=6, **_SMALL)
    await complete(replica, ids(1, 16))
    await replica.until(lambda state: state["cpu_blocks"] == 4)
    (fresh,) = gpu(await subscription.new_events())
    await complete(replica, ids(100, 16))
    await replica.until(lambda state: state["cpu_blocks"] == 6)
    assert removed(await subscription.new_events(), "cpu") == [[fresh.hashes[3], fresh.hashes[2]]]


async def test_a_reset_leaves_the_cpu_tier_unless_that_is_asked_for_and_says_nothing_of_it(
    start_publishing: StartPublishing,
) -> None:
    replica, subscription = await start_publishing(cpu_blocks=32, **_SMALL)
    await complete(replica, ids(1, 18))
    await replica.until(lambda state: state["cpu_blocks"] == 4)
    await replica.post("/reset_prefix_cache", {})
    assert cached_tokens_of(await complete(replica, ids(1, 18))) == 16
    await subscription.new()
    await replica.post("/reset_prefix_cache?reset_external=true", {})
    assert (await replica.state())["cpu_blocks"] == 0
    assert cached_tokens_of(await complete(replica, ids(1, 18))) == 0
    assert removed(await subscription.new_events(), "cpu") == []


async def test_token_ids_of_events_are_those_of_tokenize(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing()
    await replica.chat("word " * 40, max_tokens=1)
    (event,) = stored(await subscription.new_events())
    messages = [{"role": "user", "content": "word " * 40}]
    _, tokenized = await replica.post("/tokenize", {"model": "sim", "messages": messages})
    assert event.tokens == tokenized["tokens"][: len(event.tokens)]
