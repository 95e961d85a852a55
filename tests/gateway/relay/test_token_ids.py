"""The token ids that a gateway requests for itself: its client gets none of them, wherever the bytes are split."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.relay.sse import EventRelay
from gateway.relay.token_ids import without_ids

DONE = b"data: [DONE]\n\n"
END = (b"[DONE]",)
WORDS = (b'"error"',)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n'
CHAT = [
    {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [5, 6, 7]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [8]}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None, "token_ids": [9]}]},
    {"choices": [{"index": 0, "delta": {"content": 'of "token_ids":[1]'}, "finish_reason": None, "token_ids": [10]}]},
    {"choices": [{"index": 0, "delta": {"content": "c"}, "finish_reason": "stop", "token_ids": [11, 12]}]},
]
TEXT = [
    {"choices": [{"index": 0, "text": "a", "finish_reason": None, "prompt_token_ids": [5, 6], "token_ids": [8]}]},
    {"choices": [{"index": 0, "text": "b", "finish_reason": None, "prompt_token_ids": None, "token_ids": [9]}]},
    {"choices": [{"index": 0, "text": "c", "finish_reason": None, "prompt_token_ids": None, "token_ids": [10]}]},
]


def event(document: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def hidden(document: dict[str, Any]) -> dict[str, Any]:
    """As vLLM says it if nobody has asked."""
    nulled = {name: None for name in document if name.endswith("token_ids")}
    choices = [
        {name: None if name.endswith("token_ids") else value for name, value in choice.items()}
        for choice in document["choices"]
    ]
    return {**document, **nulled, "choices": choices}


@pytest.mark.parametrize("chunks", [CHAT, TEXT], ids=["chat", "text"])
def test_wherever_the_bytes_are_split_the_client_gets_no_token_ids(chunks: list[dict[str, Any]]) -> None:
    stream = b"".join(event(chunk) for chunk in chunks) + USAGE + DONE
    wanted = b"".join(event(hidden(chunk)) for chunk in chunks) + DONE
    mark = b'"delta":' if chunks is CHAT else b'"text":'
    for at in range(1, len(stream)):
        relay = EventRelay(True, END, hides_ids=True, token_mark=mark, ending_words=WORDS)
        assert relay.feed(stream[:at]) + relay.feed(stream[at:]) == wanted
        assert (relay.usage or {})["prompt_tokens"] == 7
        assert relay.saw_end
    relay = EventRelay(True, END, hides_ids=True, token_mark=mark, ending_words=WORDS)
    assert b"".join(relay.feed(event(chunk)) for chunk in chunks) == b"".join(event(hidden(chunk)) for chunk in chunks)


def test_an_event_that_only_tells_token_ids_is_not_sent() -> None:
    relay = EventRelay(False, END, hides_ids=True, ending_words=WORDS)
    empty = {"choices": [{"index": 0, "delta": {}, "finish_reason": None, "token_ids": [8]}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [8]}]}
    events = [CHAT[1], empty, CHAT[2], empty, last]
    assert b"".join(relay.feed(event(each)) for each in events) == b"".join(
        event(hidden(each)) for each in events if each is not empty
    )


def test_long_lists_of_ids_are_taken_out_in_little_time() -> None:
    prompts = event({"choices": [], "prompt_token_ids": [100_000] * 200_000})
    assert without_ids(prompts) == event({"choices": [], "prompt_token_ids": None})
    many = {"choices": [{"token_ids": [1]}] * 50_000}
    assert without_ids(event(many)) == event({"choices": [{"token_ids": None}] * 50_000})


def test_what_only_names_token_ids_stays() -> None:
    for data in (b": token_ids\n\n", b'"token_ids"', b'{"token_ids"', b'{"token_ids":[1'):
        assert without_ids(data) == data
    others = event({"choices": [{"stop_token_ids": [1]}]})
    assert without_ids(others) == others
    assert without_ids(b'[{"token_ids":[1]},{"token_ids":[2') == b'[{"token_ids":null},{"token_ids":[2'
    above = b": token_ids\r\nevent: chunk\r\n"
    assert without_ids(above + event(CHAT[1])) == above + event(hidden(CHAT[1]))


def test_a_last_event_without_its_blank_line_has_no_token_ids_either() -> None:
    relay = EventRelay(False, (), hides_ids=True)
    assert relay.feed(event(CHAT[1]).rstrip()) == b""
    assert b"[8]" not in relay.finish()
