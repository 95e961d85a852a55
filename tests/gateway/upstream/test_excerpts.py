"""Fields that are read from JSON without parsing all of it."""

from __future__ import annotations

import pytest

from gateway.upstream.excerpts import WINDOW_BYTES, last_usage


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        (b'{"data":[1],"usage":{"prompt_tokens":3}}', {"prompt_tokens": 3}),
        (
            b'{"usage" : {"prompt_tokens":3,"details":{"cached":1}},"ids":[1,2]}\n',
            {"prompt_tokens": 3, "details": {"cached": 1}},
        ),
        (b'{"usage":{"a":1},"usage":{"a":2}}', {"a": 2}),
        (b'{"usage":{"a":1},"text":"\\"usage\\":{\\"a\\":9}"}', {"a": 1}),
        (b'{"usage":{"a":1},"is":"usage","of":"usage"}', {"a": 1}),
        (b'{"usage":{"a":1},"x":{"usage":{"a":', {"a": 1}),
        (b'{"usage":{"a":"caf\xc3\xa9 \xff"}}', {"a": "caf\u00e9 \ufffd"}),
        (b'{"usage":null}', None),
        (b'{"usage":{"a":1}}' + b" " * WINDOW_BYTES, None),
        (b'"usage":{' * WINDOW_BYTES, None),
        (b'"usage":' + b'{"a":' * 10**5, None),
        (b"", None),
    ],
)
def test_usage_is_read_from_the_end(data: bytes, usage: object) -> None:
    assert last_usage(data) == usage
