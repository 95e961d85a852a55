"""Bodies for replicas: unchanged, with fields appended, or serialised again; never with a field that vLLM trusts."""

from __future__ import annotations

import zlib
from typing import Any

import orjson
import pytest

from gateway.endpoints import ENDPOINTS
from gateway.errors import ApiError
from gateway.request.reading.document import parse_document, upstream_body, usage_request
from gateway.request.reading.edit import Edit, edited

REMOVED = ("session_id", "priority")
NO_OBJECT = {
    "empty": b"",
    "a number": b"3",
    "blank": b"  \n",
    "not JSON": b"hello",
    "cut off": b'{"model":"sim","messages":[',
    "an array": b"[]",
    "a string": b'"sim"',
    "null": b"null",
    "NaN": b'{"model":"sim","temperature":NaN,"messages":[]}',
    "infinity": b'{"model":"sim","temperature":1e999,"messages":[]}',
    "invalid UTF-8": b'{"model":"sim","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a lone surrogate": b'{"model":"sim","messages":[{"role":"user","content":"\\ud800"}]}',
    "UTF-16": '{"model":"sim"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model":"sim"}',
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and closed": b'{"model":"sim","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "something behind it": b'{"model":"sim"} x',
    "single quotes": b"{'model':'sim'}",
    "a comment": b'{"model":"sim"/**/}',
    "compressed": zlib.compress(b'{"model":"sim"}'),
}


def sent(body: bytes, added: dict[str, Any] | None = None) -> tuple[bytes, dict[str, Any]]:
    out = upstream_body(body, orjson.loads(body), REMOVED, added or {})
    out = body if out is None else out
    return out, orjson.loads(out)


def test_added_fields_take_the_place_of_the_clients_own() -> None:
    """Some readers refuse a key that comes twice."""
    out, _ = sent(b'{"cache_salt": "mine", "n": 1.50} \r\n', {"cache_salt": "ours"})
    assert out == b'{"n": 1.50,"cache_salt":"ours"}'


def test_fields_are_added_to_an_empty_object_as_well() -> None:
    assert sent(b"{ }", {"a": 1})[1] == {"a": 1}


def test_beside_what_is_removed_nothing_changes() -> None:
    body = b'{"seed": 123456789012345678901234567890, "session_id": 1, "top_p" :1.10, "user":"\\ud800", "n":1, "n":2}'
    kept = b'{"seed": 123456789012345678901234567890,"top_p" :1.10,"user":"\\ud800","n":1,"n":2}'
    assert edited(body, Edit(cut={*REMOVED})) == kept


@pytest.mark.parametrize("body", NO_OBJECT.values(), ids=NO_OBJECT)
def test_a_body_that_is_no_json_object_is_a_400_that_says_so(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_document(body)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_json", "body")


@pytest.mark.parametrize(
    ("document", "added", "strip"),
    [
        ({"stream": True}, {}, False),  # what is asked depends on the replica
        ({"stream": True, "stream_options": None}, {}, False),
        ({"stream": "TRUE", "stream_options": {}}, {"stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}, False),
        (
            {"stream": True, "stream_options": {"x": 1, "include_usage": False}},
            {"stream_options": {"x": 1, "include_usage": True}},
            True,
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            {"stream_options": {"continuous_usage_stats": False, "include_usage": True}},
            True,
        ),
        ({"stream": True, "stream_options": 3}, {}, False),
        ({"stream": False}, {}, False),
        ({"stream": 1, "stream_options": {"include_usage": "off"}}, {"stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": "Yes"}}, {}, False),
        ({"stream": True, "stream_options": {"include_usage": 1.0, "continuous_usage_stats": True}}, {}, False),
        ({"stream": "maybe"}, {}, False),
        ({"stream": 2}, {}, False),
        ({"stream": [True]}, {}, False),
    ],
)
def test_usage_is_asked_for_in_streams_and_hidden_from_who_did_not_ask(
    document: dict[str, Any], added: dict[str, Any], strip: bool
) -> None:
    assert usage_request(ENDPOINTS["/v1/chat/completions"], document) == (added, strip)


def test_usage_is_not_asked_for_where_the_api_has_no_such_field() -> None:
    assert usage_request(ENDPOINTS["/v1/responses"], {"stream": True}) == ({}, False)
