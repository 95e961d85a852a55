"""The feed over real sockets: replays hang or break off, and messages are not batches."""

from __future__ import annotations

import pytest
import zmq

from coordinator.agent.batch_sequence import Lost
from coordinator.agent.feed import Feed
from tests.coordinator.agent.publisher import TOPIC, Publisher, payload
from tests.coordinator.agent.reader import PATIENT_S, SOON_S, Read
from tests.polling import eventually


async def test_next_batches_do_not_wait_for_a_replay_that_hangs(engine: Publisher, read: Read) -> None:
    engine.is_mute = True
    reader = read(engine)
    await engine.subscribed.wait()
    await reader.reads([*await engine.publish(3)])


async def test_a_gap_waits_for_a_replay_that_hangs_only_so_long(engine: Publisher, read: Read) -> None:
    engine.is_mute = True
    reader = read(engine, replay_timeout_s=PATIENT_S)
    await engine.subscribed.wait()
    first = await engine.publish()
    await engine.publish(2, is_dropped=True)
    last = await engine.publish(2)
    await reader.reads([*first, Lost(1, 3), *last])
    engine.is_mute = False
    last += await engine.publish(2, is_dropped=True)
    last += await engine.publish()
    await reader.reads([*first, Lost(1, 3), *last])


async def test_a_slow_replay_is_not_given_up_while_it_brings_something(engine: Publisher, read: Read) -> None:
    engine.reply_pause_s = PATIENT_S / 4
    published = await engine.publish(6)
    reader = read(engine, replay_timeout_s=PATIENT_S)
    await reader.reads([*published])
    assert engine.asked == [0]


async def test_replies_that_come_too_late_are_not_taken_for_those_of_the_next_replay(
    engine: Publisher, read: Read
) -> None:
    engine.is_slow = True
    reader = read(engine, replay_timeout_s=PATIENT_S)
    await engine.subscribed.wait()
    await eventually(lambda: engine.asked and reader.feed._replay_deadline_s is None)
    engine.is_slow = False
    published = await engine.publish()
    published += await engine.publish(2, is_dropped=True)
    published += await engine.publish()
    await reader.reads([*published])


async def test_replies_that_cannot_be_read_say_nothing_of_a_restart(engine: Publisher, read: Read) -> None:
    published = await engine.publish(3)
    reader = read(engine, idle_s=SOON_S)
    await reader.reads([*published])
    engine.is_garbled = True
    asked = len(engine.asked)
    await eventually(lambda: len(engine.asked) > asked + 3)
    engine.is_garbled = False
    published += await engine.publish()
    await reader.reads([*published])


async def test_a_payload_that_does_not_decode_is_lost_and_nothing_else(engine: Publisher, read: Read) -> None:
    published = await engine.publish(2)
    await engine.publish_payload(b"no batch")
    published += await engine.publish()
    reader = read(engine)
    await reader.reads([*published[:2], Lost(2, 3), published[2]])
    await engine.subscribed.wait()
    await engine.publish_payload(b"\x92\x00")
    after = await engine.publish()
    await reader.reads([*published[:2], Lost(2, 3), published[2], Lost(4, 5), *after])


@pytest.mark.parametrize(
    "frames",
    [
        [TOPIC],
        [TOPIC, b"\x00" * 8],
        [TOPIC, b"\x00" * 7, payload(2e9)],
        [TOPIC, b"\xff" * 8, payload(2e9)],
        [TOPIC, b"\x00" * 8, payload(2e9), b""],
    ],
)
async def test_messages_that_are_no_batch_are_passed_over(engine: Publisher, read: Read, frames: list[bytes]) -> None:
    reader = read(engine)
    await engine.subscribed.wait()
    published = await engine.publish()
    await engine.send(frames)
    published += await engine.publish()
    await reader.reads([*published])


async def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(zmq.ZMQError):
        await anext(Feed("localhost", None).items())
