"""The simulated replica's KV events have the shape of real events from vLLM 0.32 (tests/captures).

The same code reads both. A shape is everything on which a consumer may depend: an event's keys, their order, and the
types of its values, down to the extra keys of each block.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.agent.kv_events import Cleared, Event, Removed, Stored, decode
from tests.gateway.simulator.conftest import RunningReplica, StartPublishing
from tests.gateway.simulator.pictures import image_part
from tests.gateway.simulator.subscription import END, Subscription

_CAPTURES = Path(__file__).parent.parent / "captures"
_REPLAY_FRAMES = 4
"""The number of frames of a captured replay: it came over a DEALER, with an empty first frame."""


def captures() -> list[dict[str, Any]]:
    files = sorted(_CAPTURES.glob("events-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def payload_of(capture: dict[str, Any]) -> bytes:
    return base64.b64decode(capture["payload_b64"])


def shape(value: Any) -> Any:
    """Types at all depths: maps keep their order, a list becomes the set of its items' shapes."""
    if isinstance(value, dict):
        return tuple((name, shape(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return frozenset(shape(inner) for inner in value)
    return type(value).__name__


def blocks_shape(extra_keys: list[list[Any] | None] | None) -> Any:
    """The shapes of each block's extra keys in order. Equal neighbours appear once."""
    shapes = [None if keys is None else tuple(_key_shape(key) for key in keys) for keys in extra_keys or []]
    return tuple(each for at, each in enumerate(shapes) if at == 0 or shapes[at - 1] != each)


def _key_shape(key: Any) -> Any:
    return tuple(type(part).__name__ for part in key) if isinstance(key, list) else type(key).__name__


def event_shapes(payloads: Iterable[bytes]) -> set[Any]:
    found = set()
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            found.add((shape(event), blocks_shape(event.get("extra_keys"))))
    return found


async def chat(replica: RunningReplica, content: Any, **body: Any) -> None:
    await replica.chat(content, max_tokens=1, **body)


async def what_was_captured(replica: RunningReplica, subscription: Subscription) -> list[bytes]:
    """Sends the simulator the requests that vLLM got for the captures, and returns the live payloads."""
    text = "some words to fill a few blocks with " * 8
    await chat(replica, text)
    await chat(replica, text + "and some more, so that the event has a parent " * 8)
    await chat(replica, text[::-1], session_id="sess-1")
    await chat(replica, [image_part(1, size=(160, 160)), {"type": "text", "text": text}])
    await chat(replica, [image_part(2, uuid="u-1"), {"type": "text", "text": text}], cache_salt="tenant-A")
    await chat(replica, [image_part(3), image_part(4), {"type": "text", "text": text}])
    await replica.post("/reset_prefix_cache", {})
    for number in range(3):
        await chat(replica, f"{number}" + text * 4)
    return [message.payload for message in await subscription.new()]


@pytest.fixture
async def simulated(start_publishing: StartPublishing) -> list[bytes]:
    replica, subscription = await start_publishing(block_size=32, num_gpu_blocks=20)
    return await what_was_captured(replica, subscription)


async def test_events_have_the_keys_and_types_of_vllms(simulated: list[bytes]) -> None:
    whole_number_hashes = [payload_of(each) for each in captures() if each["n_frames"] != _REPLAY_FRAMES]
    assert event_shapes(simulated) == event_shapes(whole_number_hashes)


async def test_batches_have_the_fields_of_vllms(simulated: list[bytes]) -> None:
    def batch_shapes(payloads: Iterable[bytes]) -> set[Any]:
        batches = [msgspec.msgpack.decode(payload) for payload in payloads]
        return {(len(batch), type(batch[0]), type(batch[1]), type(batch[2])) for batch in batches}

    assert batch_shapes(simulated) == batch_shapes(map(payload_of, captures()))


async def test_an_image_stands_in_each_of_its_blocks_with_its_offset_from_there(simulated: list[bytes]) -> None:
    for payloads in ([payload_of(each) for each in captures()], simulated):
        with_images = [event for event in stored_events(payloads) if event.extra and event.extra[0]]
        assert any(len(offsets_of_images(event)) > 1 for event in with_images)
        for event in with_images:
            for offsets in offsets_of_images(event).values():
                assert 0 <= offsets[0] < event.block_size
                assert offsets == [offsets[0] - event.block_size * at for at in range(len(offsets))]


async def test_a_cache_salt_stands_in_the_first_block_only(simulated: list[bytes]) -> None:
    for payloads in ([payload_of(each) for each in captures()], simulated):
        (salted,) = [event for event in stored_events(payloads) if event.extra and "tenant-A" in (event.extra[0] or ())]
        assert salted.extra is not None
        assert salted.extra[0][-1] == "tenant-A"
        assert not any("tenant-A" in (block or ()) for block in salted.extra[1:])


async def test_our_decoder_reads_both_alike(simulated: list[bytes]) -> None:
    for payloads in ([payload_of(each) for each in captures()], simulated):
        events = [event for payload in payloads for event in decode(payload).events]
        assert {type(event) for event in events} == {Stored, Removed, Cleared}
        for event in events:
            check(event)


def check(event: Event) -> None:
    if isinstance(event, Stored):
        assert len(event.tokens) == event.block_size * len(event.hashes)
        assert event.extra is not None
        assert len(event.extra) == len(event.hashes)
        assert (event.medium, event.group, event.is_prefix) == ("gpu", 0, True)
    if isinstance(event, Removed):
        assert (len(event.hashes), event.medium, event.group) == (1, "gpu", 0)
    if not isinstance(event, Cleared):
        assert all(0 <= block_hash < 1 << 64 for block_hash in event.hashes)


async def test_messages_have_vllms_frames_live_and_replayed(start_publishing: StartPublishing) -> None:
    replica, subscription = await start_publishing()
    await chat(replica, "word " * 40)
    live = await subscription.live()
    await subscription.ask(b"", bytes(8))
    replayed = await subscription.reply()
    for capture in captures():
        simulated = replayed if capture["n_frames"] == _REPLAY_FRAMES else live
        assert len(simulated.frames) == capture["n_frames"]
        assert len(simulated.frames[-2]) == len(base64.b64decode(capture["seq_b64"])) == 8
        assert simulated.frames[-3].decode().startswith(capture["topic"].partition("@")[0])
    while replayed.frames[-2] != END:
        replayed = await subscription.reply()
    assert replayed.frames == [b"", b"", END, b""]


def stored_events(payloads: Iterable[bytes]) -> list[Stored]:
    events = [event for payload in payloads for event in decode(payload).events]
    return [event for event in events if isinstance(event, Stored)]


def offsets_of_images(event: Stored) -> dict[str, list[int]]:
    """Each image's offsets in the blocks that contain a part of it, in block order."""
    offsets: dict[str, list[int]] = {}
    for block in event.extra or []:
        for key in block or []:
            if isinstance(key, list):
                offsets.setdefault(key[0], []).append(key[1])
    return offsets
