"""The positions of images in a prompt, found from its blocks."""

from __future__ import annotations

import base64
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from coordinator.agent.blocks import BlockTable, MediaSpan
from coordinator.agent.kv_events import Stored, decode
from tests.coordinator.agent.prompts import IMAGE, SIZE, stored

CAPTURES = Path(__file__).parents[2] / "captures"


def captured(name: str) -> list[Stored]:
    lines = (CAPTURES / f"events-{name}.jsonl").read_text().splitlines()
    batches = [decode(base64.b64decode(json.loads(line)["payload_b64"])) for line in lines]
    return [event for batch in batches for event in batch.events if isinstance(event, Stored) and event.parent is None]


def runs_of(token: int, tokens: list[int]) -> list[tuple[int, int]]:
    found = []
    for (is_run), places in groupby(range(len(tokens)), key=lambda at: tokens[at] == token):
        if is_run:
            inside = list(places)
            found.append((inside[0], inside[-1] + 1))
    return found


@pytest.mark.parametrize("event", captured("vlm") + captured("samples"))
def test_images_of_real_vllm_begin_and_end_where_their_placeholders_do(event: Stored) -> None:
    told = [each for extra in event.extra or () for each in extra or () if isinstance(each, list)]
    held = BlockTable()
    held.store(event)
    spans = held.media_spans(held.path(event.hashes[-1]) or [])
    assert [span.identifier for span in spans] == list(dict.fromkeys(name for name, _ in told))
    if spans:
        assert [(span.start, span.end) for span in spans] == runs_of(event.tokens[spans[0].start], event.tokens)


def test_the_captures_have_one_prompt_with_two_images_in_one_block() -> None:
    shared = [
        extra for event in captured("vlm") for extra in event.extra or () if extra and isinstance(extra[-1], list)
    ]
    assert any(len(extra) == 2 for extra in shared)


def spans_of(tokens: list[int], extra: list[Any], chunk_blocks: int = 100) -> list[MediaSpan]:
    held, hashes = BlockTable(), list(range(1, len(tokens) // SIZE + 1))
    for at in range(0, len(hashes), chunk_blocks):
        part = slice(at * SIZE, (at + chunk_blocks) * SIZE)
        held.store(
            stored(hashes[at : at + chunk_blocks], at or None, tokens=tokens[part], extra=extra[at : at + chunk_blocks])
        )
    return held.media_spans(hashes)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 100])
def test_an_image_may_span_several_events(chunk_blocks: int) -> None:
    tokens = [1, 2, 3, *[IMAGE] * 10, 4, 5, 6]
    extra = [[["a", 3]], [["a", -1]], [["a", -5]], [["a", -9]]]
    assert spans_of(tokens, extra, chunk_blocks) == [MediaSpan("a", 3, 13)]


@pytest.mark.parametrize("chunk_blocks", [1, 100])
def test_one_image_twice_in_a_row_is_two_images(chunk_blocks: int) -> None:
    tokens = [1, IMAGE, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 3]
    extra = [[["a", 1]], [["a", -3], ["a", 2]], [["a", -2]]]
    assert spans_of(tokens, extra, chunk_blocks) == [MediaSpan("a", 1, 5), MediaSpan("a", 6, 11)]


def test_breaks_between_the_rows_of_an_image_do_not_end_it() -> None:
    tokens = [1, IMAGE, IMAGE, 7, 7, IMAGE, 7, IMAGE, IMAGE, 7, 2, 2]
    assert spans_of(tokens, [[["a", 1]], [["a", -3]], [["a", -7]]], 1) == [MediaSpan("a", 1, 9)]


def test_salts_adapters_and_digests_are_no_images() -> None:
    extra = [["adapter", ["a", 1], "salt", b"digest"], None]
    assert spans_of([1, IMAGE, IMAGE, 2, 3, 4, 5, 6], extra) == [MediaSpan("a", 1, 3)]


def test_an_image_whose_beginning_was_never_told_ends_no_later_than_it_does() -> None:
    held = BlockTable()
    held.store(stored([3], 2, tokens=[IMAGE, IMAGE, 5, 6], extra=[[["a", -4]]]))
    assert held.media_spans([0, 0, 3]) == [MediaSpan("a", 4, 10)]


def test_extra_keys_that_do_not_fit_their_tokens_are_ignored() -> None:
    held = BlockTable()
    held.store(stored([1, 2], tokens=[1, IMAGE, IMAGE, 2, 3], extra=[[["a", 9]], [["b", 1]], [["c", 0]]]))
    assert held.media_spans([1, 2]) == []


def test_what_an_offloaded_copy_did_not_tell_is_learned_from_the_gpu() -> None:
    held = BlockTable()
    held.store(stored([1], tokens=[1, IMAGE, IMAGE, 2], medium="cpu"))
    held.store(stored([1], tokens=[1, IMAGE, IMAGE, 2], extra=[[["a", 1]]]))
    assert held.media_spans([1]) == [MediaSpan("a", 1, 3)]
