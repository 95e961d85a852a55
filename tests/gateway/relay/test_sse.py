"""The relay of a stream's bytes: it reads, delays or removes some of them. These tests try every possible split."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest

from gateway.endpoints import endpoint_of
from gateway.relay import events
from gateway.relay.sse import EventRelay, next_sequence_number

DONE = b"data: [DONE]\n\n"
END = (b"[DONE]",)


def chunk(content: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"delta": {"content": content}}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
STREAM = chunk("a") + chunk('say "usage" twice') + chunk("b") + USAGE + DONE


def relay_in_pieces(pieces: list[bytes], strip_usage: bool = True) -> tuple[bytes, EventRelay]:
    relay = EventRelay(strip_usage, END)
    return b"".join(relay.feed(piece) for piece in pieces), relay


@pytest.mark.parametrize("at", range(1, len(STREAM)))
def test_wherever_the_bytes_are_split_the_client_gets_the_same_events(at: int) -> None:
    relayed, relay = relay_in_pieces([STREAM[:at], STREAM[at:]])
    assert relayed == chunk("a") + chunk('say "usage" twice') + chunk("b") + DONE
    assert (relay.usage or {})["prompt_tokens"] == 7
    assert relay.saw_end


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_byte_by_byte_nothing_is_lost(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    relayed, relay = relay_in_pieces([bytes([byte]) for byte in stream], strip_usage=False)
    assert relayed == stream
    assert relay.saw_end


ABORT = b'data: {"choices":[{"delta":{},"finish_reason": "abort"}]}\n\n'
FINISHED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
IMITATIONS = chunk('{"finish_reason":"abort"}') + b'data: {"choices":[{"logprobs":{"token":"error"}}]}\n\n' + FINISHED


@pytest.mark.parametrize("at", range(1, len(IMITATIONS + ABORT + DONE), 7))
def test_wherever_the_bytes_are_split_an_aborted_choice_is_found_and_an_imitation_is_not(at: int) -> None:
    stream = IMITATIONS + ABORT + DONE
    relay = EventRelay(False, END, ending_words=endpoint_of("/v1/chat/completions").ending_words)
    passed = relay.feed(stream[:at])
    if not relay.unfinished:
        passed += relay.feed(stream[at:])
    assert (passed, relay.unfinished) == (IMITATIONS, "aborted: the engine aborted it")


def usual(content: str, reason: str = "null", more: bytes = b"") -> bytes:
    delta = orjson.dumps({"content": content})
    head = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":' + delta
    return head + b',"logprobs":null,"finish_reason":' + reason.encode() + b"}]" + more + b"}\n\n"


@pytest.mark.parametrize(
    ("bad", "before"),
    [
        (usual("", '"abort"'), b""),
        (usual("", '"error"'), b""),
        (usual("a") + usual("", '"abort"') + usual("b"), usual("a")),
        (b'data: {"error":{"code":500}}\n\n' + usual("b"), b""),
        (b'data: {"error":{"code":500},"choices":[{"delta":{},"finish_reason":null}]}\n\n', b""),
    ],
)
def test_in_a_stream_of_events_of_one_form_others_are_found(bad: bytes, before: bytes) -> None:
    relay = EventRelay(True, END, ending_words=endpoint_of("/v1/chat/completions").ending_words)
    texts = [usual("\n\ndata: [DONE]\n\n"), usual('"finish_reason":"abort"'), usual('"error"')] * 20
    assert [relay.feed(text) for text in texts] == texts
    assert (relay.parts, relay.saw_end, relay.unfinished) == (60, False, "")
    assert (relay.feed(bad), bool(relay.unfinished)) == (before, True)


def test_an_event_too_large_to_be_parsed_may_say_that_it_was_aborted() -> None:
    relay = EventRelay(True, END, ending_words=endpoint_of("/v1/chat/completions").ending_words)
    assert relay.feed(usual("a" * 300_000)) == usual("a" * 300_000)
    assert relay.feed(usual("a" * 300_000, '"abort"') + DONE) == b""
    assert relay.why_incomplete.startswith("aborted")


def test_in_a_stream_of_events_of_one_form_its_end_and_usage_are_found() -> None:
    relay = EventRelay(True, END, ending_words=endpoint_of("/v1/chat/completions").ending_words)
    for _ in range(20):
        assert relay.feed(usual("a")) == usual("a")
    told = usual("a", more=b',"usage":{"prompt_tokens":3}')
    assert relay.feed(told) == told
    assert relay.usage == {"prompt_tokens": 3}
    assert relay.feed(usual("", '"stop"') + USAGE + DONE) == usual("", '"stop"') + DONE
    assert ((relay.usage or {})["prompt_tokens"], relay.saw_end, relay.unfinished) == (7, True, "")


def test_an_end_mark_quoted_in_content_ends_nothing() -> None:
    _, relay = relay_in_pieces([chunk("the last line is\ndata: [DONE]\n"), chunk("data: [DONE]")])
    assert not relay.saw_end
    quoted = EventRelay(False, (b"response.completed",))
    quoted.feed(b'event: response.created\ndata: {"instructions":"say event: response.completed"}\n\n')
    assert not quoted.saw_end
    quoted.feed(b"event: response.completed\ndata: {}\n\n")
    assert quoted.saw_end


@pytest.mark.parametrize("at", range(1, len(STREAM) + 10))
def test_wherever_the_ends_of_crlf_separated_events_are_split_they_are_found(at: int) -> None:
    stream = STREAM.replace(b"\n", b"\r\n")
    relay = EventRelay(False, END)
    assert relay.feed(stream[:at]) + relay.feed(stream[at:]) == stream
    assert relay.held_bytes == 0


def test_an_event_that_comes_in_half_a_million_pieces_is_gathered_once() -> None:
    """Joining each piece with all earlier ones would copy two terabytes."""
    piece = b"sixteen bytes..."
    relay = EventRelay(False, END)
    assert relay.feed(b"data: ") == b""
    for _ in range(2**19):
        assert relay.feed(piece) == b""
    assert relay.held_bytes == 6 + 2**23
    assert relay.feed(b"\n\n" + DONE) == b"data: " + piece * 2**19 + b"\n\n" + DONE
    assert (relay.saw_end, relay.held_bytes) == (True, 0)


class Parsed:
    """Records the size of each parsed text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        monkeypatch.setattr(events, "orjson", SimpleNamespace(**{**vars(orjson), "loads": self._loads}))

    def _loads(self, data: bytes) -> object:
        self.sizes.append(len(data))
        return orjson.loads(data)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


LARGE_COMPLETED = (
    b'event: response.completed\ndata: {"response":{"output":[' + b"{}," * 10**5 + b'{"text":"\\"usage\\": {}"}],'
    b'"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":4}},"user":"usage"},"sequence_number":9}\n\n'
)


@pytest.mark.parametrize("at", [1, 20, 2**17, 2**18 + 1, len(LARGE_COMPLETED) - 1, len(LARGE_COMPLETED)])
def test_a_large_event_is_passed_on_and_its_usage_read_without_parsing_it(at: int, parsed: Parsed) -> None:
    relay = EventRelay(True, (b"response.completed",))
    assert relay.feed(LARGE_COMPLETED[:at]) + relay.feed(LARGE_COMPLETED[at:] + USAGE) == LARGE_COMPLETED
    assert relay.saw_end
    assert len(parsed.sizes) == 1, "the usage chunk behind it"
    relay.feed(LARGE_COMPLETED)
    assert relay.usage == {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}


def test_an_end_mark_within_a_large_event_ends_nothing() -> None:
    relay = EventRelay(False, (b"response.completed",))
    relay.feed(b"event: response.created\ndata: " + b"x" * 2**19 + b"event: response.completed\n\n")
    assert not relay.saw_end


def test_of_many_events_with_usage_in_one_read_the_last_is_parsed(parsed: Parsed) -> None:
    def event(tokens: int) -> bytes:
        return b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":%d}}\n\n' % tokens

    events = b"".join(event(tokens) for tokens in range(1000))
    relay = EventRelay(True, END)
    assert relay.feed(events) == events
    assert (relay.usage, len(parsed.sizes)) == ({"prompt_tokens": 999}, 1)
    without = b'data: {"choices":[{"delta":{}}],"usage":null}\n\n' * 1000
    assert relay.feed(without) == without
    assert len(parsed.sizes) == 1


@pytest.mark.parametrize(
    ("events", "number"),
    [
        (b'data: {"sequence_number":3}\n\ndata: {"delta":"\\"sequence_number\\":9","sequence_number" : 4}\n\n', 5),
        (b'data: {"sequence_number":"7"}\n\n', 0),
        (b": ping\n\n", 0),
        (b"", 0),
    ],
)
def test_the_next_event_of_a_response_goes_on_counting(events: bytes, number: int) -> None:
    assert next_sequence_number(events) == number
