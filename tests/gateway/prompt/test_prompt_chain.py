"""Chains: the positions of their boundaries, the keys that requests share, and the maximum length of a chain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import stream as tags
from gateway.prompt.stream import MAX_KEYS, PromptStream, grid
from tests.gateway.prompt.reading import chat, read, user

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def http_images(count: int) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": f"http://x/{number}"}} for number in range(count)]


@given(st.integers(0, 5000), texts, texts)
def test_a_changed_or_longer_suffix_changes_no_earlier_key(shared_bytes: int, one: str, other: str) -> None:
    shared = "x" * shared_bytes
    chains = []
    for question in (one, other):
        prompt = read(chat(user(shared + question)))
        keyed = zip(prompt.keys[:-1], prompt.text_bytes[:-1], strict=True)
        chains.append([key for key, text_bytes in keyed if text_bytes <= shared_bytes])
    assert chains[0] == chains[1]
    assert len(chains[0]) == len(grid(shared_bytes))


@given(st.lists(st.text(max_size=3000), max_size=6))
def test_grid_boundaries_fall_at_the_same_text_offsets_however_the_text_is_cut(pieces: list[str]) -> None:
    pieces = [piece.encode("utf-8", "ignore").decode() for piece in pieces]
    stream = PromptStream()
    for piece in pieces:
        stream.text(piece.encode(), tags.TEXT)
    stream.finish()
    total = sum(len(piece.encode()) for piece in pieces)
    assert [offset for offset in stream.text_bytes[:-1] if offset] == grid(total)


def test_a_prompt_tells_where_its_last_answer_begins_and_ends() -> None:
    turns = [user("a"), {"role": "assistant", "content": "b" * 600}, user("c"), {"role": "assistant", "content": "d"}]
    first, second, third = read(chat(*turns[:1])), read(chat(*turns[:3])), read(chat(*turns, user("e")))
    assert first.answer == (0, 0)
    for earlier, prompt in ((first, second), (second, third)):
        before, end = prompt.answer
        assert prompt.keys[before - 1] == earlier.keys[-1], "the answer follows the prompt that it answers"
        assert prompt.keys[end - 1] == prompt.keys[-2], "and the next message follows the answer"
    assert read(chat(*turns[1:3])).answer == (0, 0), "nothing was asked before the answer"
    in_two = read(chat(*turns[:2], turns[3], user("e")))
    assert in_two.answer == (1, len(in_two.keys) - 1), "several messages in a row are one answer"


def test_a_chain_too_long_for_all_keys_still_tells_where_its_last_answer_is() -> None:
    answer = {"role": "assistant", "content": "b" * 10_000_000}
    prompt = read(chat(user("a" * 300_000), answer, user("c")))
    before, end = prompt.answer
    assert [prompt.text_bytes[at - 1] for at in (before, end)] == [300_000, 10_300_000]


def test_a_text_that_ends_on_a_grid_offset_has_its_key_before_anything_later_is_written() -> None:
    grid_bytes = grid(4096)[0]
    short, long = (read(chat(user("x" * size))) for size in (grid_bytes, grid_bytes + 1))
    assert short.keys[0] == long.keys[0]
    assert short.text_bytes[0] == grid_bytes


def test_the_grid_is_as_fine_as_an_eighth_of_the_depth() -> None:
    offsets = grid(1 << 20)
    assert offsets[:3] == [256, 512, 768]
    assert all(after - before <= max(256, before / 8) for before, after in pairwise(offsets))


def test_a_long_chain_keeps_its_messages_and_every_second_grid_boundary() -> None:
    prompt = read(chat(user("a"), user("x" * (64 << 20)), user("b")))
    assert MAX_KEYS / 2 < len(prompt.keys) <= MAX_KEYS
    assert prompt.text_bytes[0] == 1
    assert prompt.text_bytes[1:-2] == grid(64 << 20)[1::2]
    assert prompt.text_bytes[-2:] == [(64 << 20) + 1, (64 << 20) + 2]
    assert read(chat(user("a"))).keys[0] == prompt.keys[0]


def test_chains_thinned_differently_still_share_keys() -> None:
    shared = "x" * (64 << 20)
    thinned = read(chat(user(shared + "?")))
    with_images = read(chat(user([{"type": "text", "text": shared}, *http_images(100)])))
    assert len(with_images.keys) <= MAX_KEYS
    shared_keys = set(thinned.keys) & set(with_images.keys)
    assert len(shared_keys) >= len(grid(64 << 20)) // 8


def test_more_images_than_keys_keep_the_deepest() -> None:
    prompt = read(chat(user([{"type": "text", "text": "x" * 9000}, *http_images(200)])))
    assert len(prompt.keys) == MAX_KEYS
    assert prompt.image_counts == [*range(74, 201), 200]


def test_only_the_last_sixteen_messages_end_a_key() -> None:
    assert len(read(chat(*[user("hi")] * 16)).keys) == 16
    assert len(read(chat(*[user("hi")] * 30)).keys) == 16


@pytest.mark.parametrize(
    "different",
    [
        {"root_model": "other"},
        {"adapter": "base"},
        {"cache_salt": "base"},
        {"adapter": "a", "cache_salt": "b"},
        {"adapter": "b", "cache_salt": "a"},
    ],
)
def test_another_engine_shares_no_key(different: dict[str, Any]) -> None:
    body = chat(user("x" * 1000))
    ours, theirs = read(body), read(body, **different)
    assert not set(ours.keys) & set(theirs.keys)
    assert ours.affinity != theirs.affinity


def test_the_clients_own_salt_and_alias_are_not_read() -> None:
    assert read({**chat(user("hi")), "model": "alias", "cache_salt": "x"}).keys == read(chat(user("hi"))).keys


def test_large_tool_lists_have_boundaries_inside() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}", "description": "x" * 500}} for number in range(20)]
    more = [*tools[:10], {"type": "function", "function": {"name": "other"}}]
    ours, theirs = read(chat(user("hi"), tools=tools)), read(chat(user("hi"), tools=more))
    shared = [at for key, at in zip(ours.keys, ours.text_bytes, strict=True) if key in theirs.keys]
    assert shared
    assert shared[-1] >= 5000 * 7 / 8
