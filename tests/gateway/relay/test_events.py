"""Server-sent events in every spelling of the standard. A second reader, written after the standard's own steps, tells
what a client reads."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.endpoints import Endpoint, endpoint_of
from gateway.relay.events import Event, event_data, kind_of, read_event, split_events, with_data
from gateway.relay.sse import EventRelay

CHAT, RESPONSES, MESSAGES = map(endpoint_of, ("/v1/chat/completions", "/v1/responses", "/v1/messages"))


def client_reads(stream: bytes) -> list[Event]:
    """The events of a whole stream, step by step as in HTML 9.2.6. It dispatches nothing for an event without data."""
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    events, lines, line = list[Event](), list[bytes](), b""
    for at in range(len(stream)):
        char = stream[at : at + 1]
        if char not in b"\r\n":
            line += char
        elif char == b"\r" or stream[max(0, at - 1) : at] != b"\r":
            if line:
                lines.append(line)
            else:
                _dispatch(lines, events)
                lines = []
            line = b""
    return events


def _dispatch(lines: list[bytes], events: list[Event]) -> None:
    name, data = b"", list[bytes]()
    for line in lines:
        field, colon, value = line.partition(b":")
        value = value[1:] if colon and value.startswith(b" ") else value
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    if data:
        events.append(Event(name, b"\n".join(data)))


LINES = st.sampled_from(
    [
        *(
            b"data:%b%b" % (space, value)
            for space in (b"", b" ", b"  ")
            for value in (b'{"a":1}', b"[DONE]", b"", b"x:y")
        ),
        *(b"event:%b%b" % (space, value) for space in (b"", b" ") for value in (b"message_stop", b"ping", b"")),
        *(b": comment", b":", b"id: 7", b"retry:10", b"data", b"event", b"database: 1", b" data: 2"),
        *(b"", b"", b""),
    ]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


@given(STREAMS, st.booleans(), st.lists(st.integers(0, 120), max_size=4))
def test_each_client_reads_the_same_events_whatever_ends_their_lines_and_wherever_they_are_split(
    stream: bytes, has_bom: bool, cuts: list[int]
) -> None:
    stream = b"\xef\xbb\xbf" * has_bom + stream
    relay = EventRelay(False, CHAT.ends)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(places) if start < end]
    passed = [*(relay.feed(piece) for piece in pieces), relay.finish()]
    assert b"".join(passed) == stream
    read = [one for piece in passed for one in map(read_event, split_events(piece)) if one.data]
    whole = [one for one in client_reads(stream) if one.data]
    assert read[: len(whole)] == whole
    assert len(read) <= len(whole) + 1, "the last event may lack its blank line"
    assert relay.saw_end == any(one.data.strip() == b"[DONE]" for one in read)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("endpoint", "lines"),
    [
        (CHAT, [b"data:[DONE]"]),
        (CHAT, [b": a comment", b"id: 9", b"data: [DONE]"]),
        (CHAT, [b"data: [DONE] "]),
        (CHAT, [b"event: message", b"data: [DONE]"]),
        (CHAT, [b"event: done", b"data: [DONE]"]),
        (MESSAGES, [b"event: message", b'data: {"type":"message_stop"}']),
        (MESSAGES, [b"event:message_stop", b"data:{}"]),
        (MESSAGES, [b'data: {"type": "message_stop"}']),
        (MESSAGES, [b'data: {"type": "message_stop"}', b"event: message_stop", b"retry: 1"]),
        (RESPONSES, [b"event:response.completed", b"data:{}"]),
        (RESPONSES, [b'data:{"type":"response.incomplete",', b'data:"response":{}}']),
        (RESPONSES, [b'data: {"type":"response.completed","response":{"text":"%b"}}' % (b"x" * 300_000)]),
    ],
)
def test_an_end_in_any_spelling_is_an_end(endpoint: Endpoint, lines: list[bytes], end: bytes) -> None:
    stream = b"\xef\xbb\xbf" + b"".join(line + end for line in [b": hello", b"", *lines, b""])
    for at in (0, 3, len(stream) // 2, len(stream) - 1):
        relay = EventRelay(False, endpoint.ends, ending_words=endpoint.ending_words)
        assert relay.feed(stream[:at]) + relay.feed(stream[at:]) + relay.finish() == stream
        assert relay.why_incomplete == ""


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("endpoint", "lines"),
    [
        (CHAT, [b'data:{"choices":[{"finish_reason":"abort"}]}']),
        (CHAT, [b"id: 1", b'data:{"choices":[', b'data:{"finish_reason":"abort"}]}']),
        (MESSAGES, [b'data:{"type":"message_delta","delta":{"stop_reason":null}}']),
        (RESPONSES, [b'data:{"type":"response.failed","response":{"status":"failed"}}']),
        (RESPONSES, [b"event:error", b'data:{"type":"error","code":"server_error","message":"x"}']),
    ],
)
def test_an_engine_that_did_not_finish_is_understood_in_any_spelling(
    endpoint: Endpoint, lines: list[bytes], end: bytes
) -> None:
    relay = EventRelay(False, endpoint.ends, ending_words=endpoint.ending_words)
    assert relay.feed(b"".join(line + end for line in [*lines, b""])) == b""
    assert relay.unfinished


@pytest.mark.parametrize("data", [b"\n\ndata: 1\n\n\n\ndata: 2\n\n", b"data: 1\n\ndata: 2", b"", b"\n\n", b"a"])
def test_events_joined_are_the_data(data: bytes) -> None:
    assert b"".join(split_events(data)) == data


def test_usage_nested_in_a_response_or_a_message_is_found() -> None:
    completed = b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":5}}}\n\n'
    started = b'event: message_start\r\ndata: {"message":{"usage":\r\ndata:{"input_tokens":6}}}\r\n\r\n'
    assert (event_data(completed) or {})["usage"] == {"input_tokens": 5}
    assert (event_data(started) or {})["usage"] == {"input_tokens": 6}


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b": comment\n\n", b"data: 3\n\n", b"event: x\n\n"])
def test_events_without_a_json_object_carry_nothing(event: bytes) -> None:
    assert event_data(event) is None


def test_a_word_in_a_text_is_no_kind() -> None:
    assert (
        kind_of(b'data: {"type":"response.created","metadata":{"type":"response.completed"}}\n\n')
        == b"response.created"
    )


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_with_other_data_keeps_its_other_fields(end: bytes) -> None:
    event = b"".join(line + end for line in (b"event:a", b'data:{"x":', b"data:1}", b"id: 5", b": c", b""))
    changed = with_data(event, {"x": 2})
    assert client_reads(changed) == [Event(b"a", orjson.dumps({"x": 2}))]
    assert b"id: 5" + end in changed
