"""The stream's format and its keys: a stream has only one reading, and later content does not change earlier keys."""

from __future__ import annotations

import base64
from typing import Any

import blake3
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import stream as tags
from tests.gateway.prompt.reading import chat, read

TEXT_TAGS = {tags.TEXT, tags.REASONING, tags.TOOL, tags.ARGUMENTS, tags.PART}
ONE_VALUE_TAGS = {
    tags.VERSION, tags.KIND, tags.MODEL, tags.ADAPTER, tags.CACHE_SALT,
    tags.MESSAGE, tags.NAME, tags.CALL_ID, tags.CALL,
}  # fmt: skip
TWO_VALUE_TAGS = {tags.OPTION, tags.CALL_FIELD, tags.PART_FIELD, tags.FIELD}
Token = tuple[bytes, ...]


class RecordingHasher:
    """BLAKE3 that records its input and the positions of its digests."""

    def __init__(self) -> None:
        self.written = b""
        self.digested_at: list[int] = []
        RecordingHasher.latest = self

    latest: RecordingHasher

    def update(self, data: bytes) -> None:
        self.written += bytes(data)

    def digest(self, length: int) -> bytes:
        return blake3.blake3(self.written).digest(length=length)

    def hexdigest(self, length: int) -> str:
        self.digested_at.append(len(self.written))
        return blake3.blake3(self.written).hexdigest(length=length)


def stream_of(body: dict[str, Any], path: str = "/v1/chat/completions", **engine: Any) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "blake3", RecordingHasher)
        read({"model": "m", **body}, path, **engine)
    return RecordingHasher.latest.written


def decode(stream: bytes) -> list[Token]:
    """Reads a stream back, using only its format as docs/adr/0001-prompt-stream.md describes it."""
    tokens: list[Token] = []
    at = 0

    def value() -> bytes:
        nonlocal at
        length = int.from_bytes(stream[at : at + 4], "little")
        at += 4 + length
        return stream[at - length : at]

    def digest() -> bytes:
        nonlocal at
        at += 32
        return stream[at - 32 : at]

    while at < len(stream):
        start = at
        at = stream.index(b"\xff", start) + 2
        text, tag = stream[start : at - 2], stream[at - 2 : at]
        if tag in TEXT_TAGS:
            tokens.append((tag, text))
            continue
        assert not text, "raw bytes that no text tag ends"
        if tag in ONE_VALUE_TAGS:
            tokens.append((tag, value()))
        elif tag in TWO_VALUE_TAGS:
            tokens.append((tag, value(), value()))
        elif tag in (tags.IMAGE, tags.IMAGE_URL):
            tokens.append((tag, digest()))
        elif tag == tags.MEDIA:
            tokens.append((tag, value(), digest()))
        elif tag == tags.TOKENS:
            end = next(i for i in range(at, len(stream), 4) if stream[i : i + 4] == tags.TOKENS_END)
            tokens.append((tag, stream[at:end]))
            at = end + 4
        else:
            assert tag == tags.MESSAGE_END, tag
            tokens.append((tag,))
    return tokens


def expected_part(part: dict[str, Any]) -> list[Token]:
    match part["type"]:
        case "text":
            extra = [(tags.PART_FIELD, b"style", orjson.dumps(part["style"]))] if "style" in part else []
            return [(tags.TEXT, part["text"].encode()), *extra]
        case "image_url":
            url: str = part["image_url"]["url"]
            if url.startswith("http"):
                return [(tags.IMAGE_URL, blake3.blake3(url.encode()).digest())]
            data = base64.b64decode(url.partition(",")[2])
            return [(tags.IMAGE, blake3.blake3(data).digest())]
        case "input_audio":
            content = orjson.dumps(part["input_audio"], option=orjson.OPT_SORT_KEYS)
            return [(tags.MEDIA, b"input_audio", blake3.blake3(content).digest())]
        case _:
            return [(tags.PART, orjson.dumps(part, option=orjson.OPT_SORT_KEYS))]


def expected_message(message: dict[str, Any]) -> list[Token]:
    tokens: list[Token] = [(tags.MESSAGE, message["role"].encode())]
    if "name" in message:
        tokens.append((tags.NAME, message["name"].encode()))
    if "tool_call_id" in message:
        tokens.append((tags.CALL_ID, message["tool_call_id"].encode()))
    if "reasoning" in message:
        tokens.append((tags.REASONING, message["reasoning"].encode()))
    content = message.get("content") or []
    if isinstance(message.get("content"), str):
        content = [{"type": "text", "text": message["content"]}]
    for part in content:
        tokens += expected_part(part)
    for call in message.get("tool_calls", []):
        function = call["function"]
        tokens += [(tags.CALL, function["name"].encode()), (tags.CALL_ID, call["id"].encode())]
        if "index" in call:
            tokens.append((tags.CALL_FIELD, b"index", orjson.dumps(call["index"])))
        tokens.append((tags.ARGUMENTS, orjson.dumps(orjson.loads(function["arguments"]))))
    if "task" in message:
        tokens.append((tags.FIELD, b"task", orjson.dumps(message["task"])))
    return [*tokens, (tags.MESSAGE_END,)]


def expected_root(body: dict[str, Any]) -> list[Token]:
    root: list[Token] = [(tags.VERSION, b"1"), (tags.KIND, b"chat"), (tags.MODEL, b"base")]
    if "chat_template_kwargs" in body:
        kwargs = orjson.dumps(body["chat_template_kwargs"], option=orjson.OPT_SORT_KEYS)
        root.append((tags.OPTION, b"chat_template_kwargs", kwargs))
    return root + [(tags.TOOL, orjson.dumps(tool)) for tool in body.get("tools", [])]


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
words = st.sampled_from(["a", "ab", "b", "", "user", "\x01", "ÿ", "é"])
extras = st.dictionaries(words, st.integers(0, 2), max_size=2)
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}, optional={"style": st.integers(0, 2)}),
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.builds(
        lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        st.binary(max_size=3).map(lambda data: base64.b64encode(data).decode()),
    ),
    st.builds(lambda path: {"type": "image_url", "image_url": {"url": f"http://x/{path}"}}, words),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": data}}, words),
    st.builds(lambda data: {"type": "hologram", "data": data}, words),
)
calls = st.builds(
    lambda name, call_id, arguments, index: {
        "id": call_id, "type": "function", **index,
        "function": {"name": name, "arguments": orjson.dumps(arguments).decode()},
    },
    words, words, extras, st.sampled_from([{}, {"index": 0}, {"index": 1}]),
)  # fmt: skip
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "critic"])},
    optional={
        "content": st.one_of(st.none(), words, texts, st.lists(parts, max_size=3)),
        "name": words,
        "tool_call_id": words,
        "reasoning": words,
        "tool_calls": st.lists(calls, max_size=2),
        "task": words,
    },
)
conversations = st.lists(messages, max_size=4)
bodies = st.fixed_dictionaries(
    {"messages": conversations},
    optional={
        "tools": st.lists(st.builds(lambda name: {"type": "function", "function": {"name": name}}, words), max_size=2),
        "chat_template_kwargs": extras,
        "continue_final_message": st.booleans(),
    },
)


@given(bodies)
def test_a_stream_reads_back_as_the_request_it_was_written_from(body: dict[str, Any]) -> None:
    # A stream reads back as the whole request, so two different requests cannot have the same stream.
    expected = expected_root(body) + [token for message in body["messages"] for token in expected_message(message)]
    if body.get("continue_final_message"):
        expected.append((tags.OPTION, b"continue_final_message", b"true"))
    assert decode(stream_of(body)) == expected


@given(conversations, conversations)
def test_more_messages_extend_the_stream_and_change_nothing_in_it(
    first: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    assert stream_of(chat(*first, *more)).startswith(stream_of(chat(*first)))


@given(conversations.filter(bool), st.lists(messages, max_size=15))
def test_the_next_turn_contains_this_turns_tip(first: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    assert read(chat(*first)).keys[-1] in read(chat(*first, *more)).keys


@given(bodies)
def test_every_key_is_the_blake3_of_the_stream_up_to_it(body: dict[str, Any]) -> None:
    stream = stream_of(body)
    offsets = RecordingHasher.latest.digested_at
    prompt = read({"model": "m", **body})
    assert prompt.keys == [blake3.blake3(stream[:offset]).hexdigest(length=16) for offset in offsets]
    assert offsets[-1] == len(stream)
    assert len(set(prompt.keys)) == len(prompt.keys) == len(prompt.text_bytes) == len(prompt.image_counts)
    assert prompt.text_bytes == sorted(prompt.text_bytes)
    assert prompt.image_counts == sorted(prompt.image_counts)
    assert prompt.image_counts[-1] == len(prompt.images)
