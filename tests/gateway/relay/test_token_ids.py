"""The token ids that a gateway requests from an older engine: it reads them and removes them, wherever the bytes are
split."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.relay.sse import EventRelay
from gateway.relay.token_ids import TokenIds

DONE = b"data: [DONE]\n\n"
END = (b"[DONE]",)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n'
CHAT = [
    {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [5, 6, 7]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [8]}]},
    {"choices": [{"index": 0, "delta": {"content": 'of "token_ids"'}, "token_ids": [9, 10]}]},
]
TEXT = [
    {"choices": [{"index": 0, "text": "a", "prompt_token_ids": [5, 6, 7], "token_ids": [8]}]},
    {"choices": [{"index": 0, "text": "b", "prompt_token_ids": None, "token_ids": [9]}]},
]


def event(document: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def without_ids(document: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {name: value for name, value in choice.items() if not name.endswith("token_ids")}
        for choice in document["choices"]
    ]
    return {"choices": choices}


@pytest.mark.parametrize("chunks", [CHAT, TEXT], ids=["chat", "text"])
def test_wherever_the_bytes_are_split_the_client_gets_no_token_ids(chunks: list[dict[str, Any]]) -> None:
    stream = b"".join(event(chunk) for chunk in chunks) + USAGE + DONE
    wanted = b"".join(event(without_ids(chunk)) for chunk in chunks) + DONE
    for at in range(1, len(stream)):
        token_ids = TokenIds(strip=True)
        relay = EventRelay(True, END, token_ids.take_from_events)
        assert relay.feed(stream[:at]) + relay.feed(stream[at:]) == wanted
        assert token_ids.of_prompt == [5, 6, 7]
        assert (relay.usage or {})["prompt_tokens"] == 7
        assert relay.saw_end


@pytest.mark.parametrize("chunks", [CHAT, TEXT], ids=["chat", "text"])
def test_a_client_that_wants_token_ids_gets_them_as_they_came(chunks: list[dict[str, Any]]) -> None:
    stream = b"".join(event(chunk) for chunk in chunks) + DONE
    token_ids = TokenIds(strip=False)
    assert EventRelay(False, END, token_ids.take_from_events).feed(stream) == stream
    assert token_ids.of_prompt == [5, 6, 7]


def test_token_ids_of_long_prompts_are_taken_out_up_to_a_megabyte() -> None:
    token_ids = TokenIds(strip=True)
    long, longer = ([100_000] * count for count in (100_000, 200_000))
    assert token_ids.take_from_events(event({"choices": [], "prompt_token_ids": long})) == event({"choices": []})
    assert token_ids.of_prompt == long
    too_large = event({"choices": [], "prompt_token_ids": longer})
    assert token_ids.take_from_events(too_large) == too_large
    too_intricate = event({"choices": [{"token_ids": [{}] * 50_000}]})
    assert token_ids.take_from_events(too_intricate) == too_intricate


def test_the_lines_above_an_events_data_stay() -> None:
    token_ids = TokenIds(strip=True)
    above = b": token_ids\r\nevent: chunk\r\n"
    assert token_ids.take_from_events(above + event(CHAT[0])) == above + event(without_ids(CHAT[0]))
    assert token_ids.take_from_events(b": token_ids\n\n") == b": token_ids\n\n"


def test_a_last_event_without_its_blank_line_has_no_token_ids_either() -> None:
    relay = EventRelay(False, (), TokenIds(strip=True).take_from_events)
    assert relay.feed(event(CHAT[1]).rstrip()) == b""
    assert b"token_ids" not in relay.finish()


@pytest.mark.parametrize(
    ("document", "ids"),
    [
        ({"prompt_token_ids": [1], "choices": [{"token_ids": [2]}]}, [1]),
        ({"choices": [{"prompt_token_ids": [1]}, {"prompt_token_ids": [3]}]}, [1]),
        ({"choices": [{"token_ids": None}], "prompt_token_ids": None}, []),
        ({"choices": None, "prompt_token_ids": "5"}, []),
        ({"choices": ["token_ids"]}, []),
    ],
)
def test_token_ids_are_taken_out_of_a_whole_answer(document: dict[str, Any], ids: list[int]) -> None:
    token_ids = TokenIds(strip=True)
    assert b'token_ids":' not in token_ids.take_from_body(orjson.dumps(document))
    assert token_ids.of_prompt == ids


@pytest.mark.parametrize("body", [b'"token_ids"', b'{"token_ids"'])
def test_an_answer_that_is_no_json_object_is_passed_on(body: bytes) -> None:
    assert TokenIds(strip=True).take_from_body(body) == body
