"""Requests that cannot be read, or that could be read in two ways."""

from __future__ import annotations

import pytest

from tests.gateway.http.conftest import CLOSE, Served

HOST = b"host: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
UPGRADE = HOST + b"connection: upgrade\r\nupgrade: h2c\r\n"


MALFORMED = (b"400 Bad Request", b"invalid_http")
TOO_LARGE = (b"431 Request Header Fields Too Large", b"headers_too_large")
UNSUPPORTED = (b"501 Not Implemented", b"unsupported_encoding")


@pytest.mark.parametrize(
    ("request_bytes", "refusal", "named"),
    [
        (b"this is no HTTP\r\n\r\n", MALFORMED, b"method"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", MALFORMED, b"header"),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", MALFORMED, b"version"),
        (b"GET /\r\n\r\n", MALFORMED, b"version"),
        (b"GET x://:y HTTP/1.1\r\n" + HOST + b"\r\n", MALFORMED, b"target"),
        (b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n", MALFORMED, b"CONNECT"),
        (b"GET / HTTP/1.1\r\n\r\n", MALFORMED, b"Host"),
        (b"GET / HTTP/1.1\r\n" + HOST * 2 + b"\r\n", MALFORMED, b"Host"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\n" + CHUNKED + b"\r\n", MALFORMED, b"Length"),
        (b"POST / HTTP/1.1\r\n" + CHUNKED * 2 + b"\r\n", MALFORMED, b"Encoding"),
        (b"POST / HTTP/1.0\r\n" + CHUNKED + b"\r\n", MALFORMED, b"Encoding"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", UNSUPPORTED, b"transfer-encoding"),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 70_000 + b"\r\n\r\n", TOO_LARGE, b"65536"),
        (b"GET /" + b"x" * 70_000, TOO_LARGE, b"65536"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a:b\r\n" * 256 + b"\r\n", TOO_LARGE, b"256"),
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 300, TOO_LARGE, b"256"),
        (b"GET x://:y HTTP/1.1\r\n" + UPGRADE + b"\r\n", MALFORMED, b"target"),
        (b"POST / HTTP/1.1\r\n" + UPGRADE + b"transfer-encoding: gzip, chunked\r\n\r\n", UNSUPPORTED, b"chunked"),
    ],
    ids=[
        "no HTTP",
        "no header",
        "HTTP/2",
        "HTTP/0.9",
        "no target",
        "for proxies",
        "no host",
        "two hosts",
        "two lengths",
        "chunked twice",
        "chunked before there were chunks",
        "an unknown coding",
        "a long header",
        "a long path",
        "many headers",
        "many headers, not at their end",
        "no target for an upgrade",
        "an unknown coding and an upgrade",
    ],
)
async def test_what_cannot_be_read_is_refused_with_what_is_wrong(
    served: Served, request_bytes: bytes, refusal: tuple[bytes, bytes], named: bytes
) -> None:
    said = await served.says(request_bytes)
    status, code = refusal
    assert said.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert b'"code":"%b"' % code in said
    assert named in said.partition(b'"message":"')[2]
    assert CLOSE in said
    assert said.count(b"\r\n\r\n") == 1
