"""The feed over real sockets: a published batch arrives once and in order, or the feed reports it as lost."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

from coordinator.agent.batch_sequence import Lost, Received
from coordinator.agent.kv_events import decode
from tests.coordinator.agent.publisher import Publisher
from tests.coordinator.agent.reader import SOON_S, Read
from tests.polling import eventually

CAPTURES = Path(__file__).parents[2] / "captures"


async def test_what_was_published_before_and_after_it_came_arrives_once_and_in_order(
    engine: Publisher, read: Read
) -> None:
    before = await engine.publish(5)
    reader = read(engine)
    await reader.reads([*before])
    await engine.subscribed.wait()
    after = await engine.publish(5)
    await reader.reads([*before, *after])


async def test_an_engine_on_the_same_host_may_publish_on_sockets_that_files_rights_protect(
    read: Read, tmp_path: Path
) -> None:
    engine = Publisher(endpoints=(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"))
    try:
        before = await engine.publish(2)
        reader = read(engine)
        await engine.subscribed.wait()
        await reader.reads([*before, *await engine.publish(2)])
    finally:
        await engine.close()


async def test_a_batch_that_was_dropped_is_replayed_before_those_that_came(engine: Publisher, read: Read) -> None:
    reader = read(engine)
    await engine.subscribed.wait()
    published = await engine.publish(2)
    await reader.reads([*published])
    published += await engine.publish(2, is_dropped=True)
    published += await engine.publish(3)
    await reader.reads([*published])


async def test_a_batch_that_was_dropped_at_the_tail_is_found_while_idle(engine: Publisher, read: Read) -> None:
    reader = read(engine, idle_s=SOON_S)
    await engine.subscribed.wait()
    published = await engine.publish(2)
    published += await engine.publish(2, is_dropped=True)
    await reader.reads([*published])


async def test_an_idle_engine_is_asked_for_one_batch_only(engine: Publisher, read: Read) -> None:
    await engine.publish(50)
    read(engine, idle_s=SOON_S)
    await eventually(lambda: len(engine.asked) > 3)
    assert set(engine.asked[1:]) == {49}


async def test_without_replays_every_gap_is_lost(engine: Publisher, read: Read) -> None:
    await engine.publish(2)
    reader = read(engine, replays=False, idle_s=SOON_S)
    await engine.subscribed.wait()
    second = await engine.publish()
    await engine.publish(3, is_dropped=True)
    third = await engine.publish()
    await reader.reads([Lost(0, 2), *second, Lost(3, 6), *third])
    assert engine.asked == []


async def test_batches_published_during_a_long_replay_follow_it(engine: Publisher, read: Read) -> None:
    published = await engine.publish(2000)
    reader = read(engine, idle_s=SOON_S)
    await engine.subscribed.wait()
    for _ in range(1000):
        published += await engine.publish(2)
        await asyncio.sleep(0)
    await eventually(lambda: len(reader.items) >= len(published))
    assert reader.items == published


async def test_a_reader_that_holds_few_batches_gets_all_of_them(engine: Publisher, read: Read) -> None:
    reader = read(engine, hwm=5, idle_s=SOON_S)
    await engine.subscribed.wait()
    published = await engine.publish(5000)
    await eventually(lambda: len(reader.items) >= len(published))
    assert reader.items == published


async def test_replies_of_engines_that_send_no_topic_with_them_are_understood(read: Read) -> None:
    engine = Publisher(has_topic_in_replays=False)
    await read(engine).reads([*await engine.publish(3)])
    await engine.close()


async def test_a_number_with_the_name_of_its_engines_life_behind_it_is_understood(read: Read) -> None:
    engine = Publisher()
    engine.life = bytes(range(16))
    before = await engine.publish(2)  # as from an idle engine: without events
    reader = read(engine)
    await engine.subscribed.wait()
    await engine.publish(is_dropped=True)
    after = await engine.publish()
    await eventually(lambda: reader.items[-1:] == after)
    assert reader.items[:2] == before
    assert [item.seq for item in reader.items if isinstance(item, Received)] == [0, 1, 2, 3]
    await engine.close()


@pytest.mark.parametrize("capture", ["events-samples.jsonl", "events-vlm.jsonl"])
async def test_what_vllm_sent_arrives_live_and_replayed(engine: Publisher, read: Read, capture: str) -> None:
    lines = [json.loads(line) for line in (CAPTURES / capture).read_text("utf-8").splitlines()]
    for line in lines:
        assert line["n_frames"] in {3, 4}  # 3 frames live; 4 replayed, behind an empty frame
        assert base64.b64decode(line["seq_b64"]) == line["seq"].to_bytes(8, "big")
    payloads = [base64.b64decode(line["payload_b64"]) for line in lines]
    for body in payloads[::2]:
        await engine.publish_payload(body)
    reader = read(engine)
    await engine.subscribed.wait()
    for body in payloads[1::2]:
        await engine.publish_payload(body)
    sent = [*payloads[::2], *payloads[1::2]]
    await reader.reads([Received(seq, decode(body)) for seq, body in enumerate(sent)])


async def test_a_feed_that_is_closed_lets_go_of_the_engine(engine: Publisher, read: Read) -> None:
    reader = read(engine)
    await engine.subscribed.wait()
    await reader.close()
    await eventually(lambda: not engine.subscribed.is_set())
