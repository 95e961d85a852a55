"""A request's head: its limits, what is wrong with it beyond its grammar, and how it reads without an upgrade."""

from __future__ import annotations

from itertools import chain

from gateway.errors import ApiError

RawHeaders = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; as much as the strictest load balancers in front allow."""
MAX_HEADERS = 256

HEAD_TOO_LARGE = ApiError(
    431,
    "headers_too_large",
    f"headers: the request line and headers together exceed {MAX_HEAD_BYTES} bytes.",
    "headers",
)
TOO_MANY_HEADERS = ApiError(431, "headers_too_large", f"headers: there are more than {MAX_HEADERS}.", "headers")
_UNKNOWN_CODING = ApiError(
    501,
    "unsupported_encoding",
    "transfer-encoding: only `chunked` is understood, given once and alone.",
    "transfer-encoding",
)

_VERSION = b" HTTP/1."
_HEAD_END = b"\r\n\r\n"
_OF_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})


def malformed(reason: str) -> ApiError:
    """What the parser does not read."""
    return ApiError(400, "invalid_http", f"This is not a well-formed HTTP/1.1 request: {reason}.")


def problem_of(url: bytes, headers: RawHeaders, version: str) -> ApiError | None:
    """Why a request with this head is refused. What its length would be must not be read in two ways (RFC 9112, 6.1),
    and whose it is must be told once (3.2)."""
    if len(url) + sum(map(len, chain.from_iterable(headers))) > MAX_HEAD_BYTES:
        return HEAD_TOO_LARGE
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names:
        if version == "1.0":
            return malformed("HTTP/1.0 has no Transfer-Encoding")
        # Where `chunked` is not the last, there is no length at all: the parser says so.
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        if any(coding != b"chunked" and coding.endswith(b"chunked") for coding in codings):
            return _UNKNOWN_CODING
    hosts = names.count(b"host")
    if version not in ("1.1", "1.0"):
        return malformed("its version is neither HTTP/1.1 nor HTTP/1.0")
    if hosts > 1 or (not hosts and version == "1.1"):
        return malformed("it must have one Host header")
    return None


def without_upgrade(method: bytes, url: bytes, headers: RawHeaders) -> bytes:
    """A head again, without what asks for another protocol, and the last on its connection: so that however many ask,
    it is read again once."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in _OF_UPGRADES]
    return b"".join([b"%b %b HTTP/1.1\r\n" % (method, url), *lines, b"connection: close\r\n\r\n"])


def end_of_head(data: bytes, at: int) -> int:
    """Where the head that begins at `at` ends; the end of `data` where it does not. Empty lines may stand before it."""
    line = data.find(_VERSION, at)
    found = data.find(_HEAD_END, line) if line >= 0 else -1
    return found + len(_HEAD_END) if found >= 0 else len(data)


def next_request(data: bytes, at: int) -> int:
    """Where, behind `at`, a line begins that may be a request's first; the end of `data` where none does."""
    line_end = data.find(b"\n", at)
    found = data.find(_VERSION, line_end) if line_end >= 0 else -1
    return data.rfind(b"\n", line_end, found) + 1 if found >= 0 else len(data)
