"""Payloads from engines, and any other payload that may arrive."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.agent.kv_events import Cleared, EventError, Removed, Stored, decode

CAPTURES = Path(__file__).parents[2] / "captures"
STORED = {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": 6, "token_ids": [1, 2], "block_size": 1}


def captured(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CAPTURES / f"events-{name}.jsonl").read_text().splitlines()]


def as_number(told: Any) -> Any:
    """Hashes are bytes in one capture. Its JSON has them in hex."""
    return int(told["hex"][-16:], 16) if isinstance(told, dict) else told


def payload(*events: Any, tail: tuple[Any, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), *tail])


def one(event: Any) -> Any:
    (found,) = decode(payload(event)).events
    return found


@pytest.mark.parametrize("line", captured("samples") + captured("vlm"), ids=lambda line: f"seq {line['seq']}")
def test_what_real_vllm_published_is_read_as_it_was_captured(line: dict[str, Any]) -> None:
    ts, events, _ = line["decoded"]
    batch = decode(base64.b64decode(line["payload_b64"]))
    assert (batch.ts, len(batch.events)) == (ts, len(events))
    for found, told in zip(batch.events, events, strict=True):
        match found:
            case Stored():
                assert told["type"] == "BlockStored"
                assert found.hashes == [as_number(each) for each in told["block_hashes"]]
                assert found.parent == as_number(told["parent_block_hash"])
                assert found.tokens == told["token_ids"]
                assert len(found.tokens) == found.block_size * len(found.hashes)
                assert found.extra == told["extra_keys"]
                assert (found.medium, found.group, found.is_prefix) == ("gpu", 0, True)
                assert found.session == told.get("session_id")
            case Removed():
                assert told["type"] == "BlockRemoved"
                assert (found.hashes, found.medium, found.group) == (told["block_hashes"], "gpu", 0)
            case Cleared():
                assert told == {"type": "AllBlocksCleared"}


def test_a_batch_may_lack_its_rank_and_have_fields_of_a_later_version() -> None:
    assert decode(payload(tail=())) == decode(payload(tail=(1, "more")))


def test_unknown_fields_are_ignored() -> None:
    assert one({**STORED, "later": {"nested": [1]}}) == one(STORED)


@pytest.mark.parametrize(
    "unknown",
    [{"type": "BlockMoved", "x": 1}, {"type": "BlockStoredTwice", "block_hashes": "?"}, ["BlockStored", [7]], {"x": 1}],
)
def test_events_of_an_unknown_type_are_left_out_and_the_others_kept(unknown: Any) -> None:
    assert decode(payload(STORED, unknown, STORED)).events == [one(STORED)] * 2


def test_hashes_that_are_bytes_are_cut_to_what_an_integer_would_have_been() -> None:
    digest = bytes(range(24)) + (0xFEDCBA9876543210).to_bytes(8, "big")
    assert one({**STORED, "block_hashes": [digest, 9], "parent_block_hash": digest}) == Stored(
        [0xFEDCBA9876543210, 9], 0xFEDCBA9876543210, [1, 2], 1, "gpu", None, None, True, None
    )
    assert one({"type": "BlockRemoved", "block_hashes": [digest]}).hashes == [0xFEDCBA9876543210]


@pytest.mark.parametrize(
    ("kind", "is_prefix"),
    [
        *((kind, True) for kind in (None, "full_attention", "mla_attention", "sink_full_attention")),
        *((kind, False) for kind in ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba")),
        *((kind, False) for kind in ("unknown", "a_kind_to_come")),
    ],
)
def test_only_groups_of_full_attention_tell_of_prefixes(kind: str | None, is_prefix: bool) -> None:
    assert one({**STORED, "kv_cache_spec_kind": kind}).is_prefix is is_prefix


def test_a_reset_is_of_the_gpus_cache_unless_it_names_another_medium() -> None:
    assert one({"type": "AllBlocksCleared"}) == Cleared("gpu")
    assert one({"type": "AllBlocksCleared", "medium": "CPU"}) == Cleared("cpu")


def test_a_missing_medium_is_the_gpu_and_names_are_lower_case() -> None:
    assert one({**STORED, "medium": None}).medium == "gpu"
    assert one({**STORED, "medium": "CPU"}).medium == "cpu"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1.0]),
        payload(5),
        payload({**STORED, "block_hashes": ["text"]}),
        payload({**STORED, "token_ids": [1.5]}),
        payload({"type": "BlockRemoved"}),
        payload(STORED)[:-3],
        payload({"type": "?"}).replace(b"?", b"\xff"),
        payload(STORED) + b"\x00",
    ],
)
def test_what_is_no_batch_of_events_is_an_event_error(garbage: bytes) -> None:
    with pytest.raises(EventError):
        decode(garbage)


@given(st.binary(max_size=64), st.binary(max_size=32))
def test_whatever_comes_is_a_batch_or_an_event_error(raw: bytes, event: bytes) -> None:
    for sent in (raw, b"\x93\xcb" + bytes(8) + b"\x91" + event + b"\x00"):
        try:
            decode(sent)
        except EventError:
            continue


def test_hashes_with_a_sign_are_read_as_unsigned() -> None:
    stored = one(STORED | {"block_hashes": [-5, b"\xff" * 32], "parent_block_hash": -1})
    assert stored.hashes == [2**64 - 5, 2**64 - 1]
    assert stored.parent == 2**64 - 1
    assert one({"type": "BlockRemoved", "block_hashes": [-5]}).hashes == [2**64 - 5]
