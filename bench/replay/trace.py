"""Recorded traffic of Mooncake's form: when requests came, how long they were, and which prefixes they shared.

A file has one JSON object a line, with `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`,
one id for each block of the prompt. An id stands for its block and all blocks before it, so two prompts share a prefix
exactly as far as their ids agree. The last id may stand for a part of a block. github.com/kvcache-ai/Mooncake has such
files in FAST25-release/traces.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

BLOCK_TOKENS = 512
"""The tokens of a block in Mooncake's own traces."""


class BadTrace(Exception):
    """The file is not of Mooncake's form, or nothing of it is left to replay."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they came."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def span_s(self) -> float:
        """The time from the first request to the last."""
        return (self.requests[-1].at_ms - self.requests[0].at_ms) / 1000

    @property
    def distinct_blocks(self) -> int:
        return len({block for request in self.requests for block in request.block_ids})

    @property
    def repeated_tokens(self) -> int:
        """The prompt tokens whose leading ids came in an earlier request."""
        return sum(
            min(leading * self.block_tokens, request.input_tokens)
            for request, leading in zip(self.requests, repeated_blocks(self.requests), strict=True)
        )

    def first(self, count: int) -> Trace:
        return replace(self, requests=self.requests[:count])

    def window(self, from_s: float, to_s: float) -> Trace:
        """The requests of these seconds of the recording, without the one at `to_s`. Raises BadTrace if there are
        none."""
        found = tuple(request for request in self.requests if from_s * 1000 <= request.at_ms < to_s * 1000)
        if not found:
            ends_s = self.requests[-1].at_ms / 1000
            raise BadTrace(f"no request came from {from_s:g} to {to_s:g} s; the last one came at {ends_s:g} s")
        return replace(self, requests=found)

    def scaled(self, block_tokens: int) -> Trace:
        """The same traffic with blocks of another size. Prompts and answers change by the same factor, so all shares
        stay nearly the same. No part of a block and no answer becomes empty."""
        factor = block_tokens / self.block_tokens

        def scale(request: TraceRequest) -> TraceRequest:
            full = len(request.block_ids) - 1
            part = max(1, round((request.input_tokens - full * self.block_tokens) * factor))
            return replace(
                request,
                input_tokens=full * block_tokens + part,
                output_tokens=max(1, round(request.output_tokens * factor)),
            )

        return Trace(tuple(map(scale, self.requests)), block_tokens)


def repeated_blocks(requests: Iterable[TraceRequest]) -> Iterator[int]:
    """For each request, how many of its leading blocks came in an earlier request."""
    seen: set[int] = set()
    for request in requests:
        yield next((at for at, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids))
        seen.update(request.block_ids)


# -- reading ---------------------------------------------------------------------------------------------------------


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Reads a .jsonl or .jsonl.gz file whose blocks have `block_tokens` tokens. Raises BadTrace with the line and the
    field."""
    requests: list[TraceRequest] = []
    uses: dict[int, _FirstUse] = {}
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    request = _request(line, block_tokens, where)
                    _check_uses(request, block_tokens, uses, number, where)
                    requests.append(request)
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(f"{path}: {error}") from error
    if not requests:
        raise BadTrace(f"{path}: it has no requests")
    requests.sort(key=lambda request: request.at_ms)
    return Trace(tuple(requests), block_tokens)


def _request(line: bytes, block_tokens: int, where: str) -> TraceRequest:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadTrace(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: a JSON object is needed, not {_shown(row)}")
    request = TraceRequest(
        at_ms=_timestamp(row, where),
        input_tokens=_length(row, "input_length", where),
        output_tokens=_length(row, "output_length", where),
        block_ids=tuple(_block_ids(row, where)),
    )
    blocks = -(-request.input_tokens // block_tokens)
    if len(request.block_ids) != blocks:
        raise BadTrace(
            f"{where}: hash_ids: {len(request.block_ids)} ids, but an input_length of {request.input_tokens} has "
            f"{blocks} blocks of {block_tokens} tokens"
        )
    return request


def _value(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise BadTrace(f"{where}: {name}: it is missing")
    return row[name]


def _timestamp(row: dict[str, Any], where: str) -> float:
    value = _value(row, "timestamp", where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadTrace(f"{where}: timestamp: milliseconds from 0 are needed, not {_shown(value)}")
    return float(value)


def _length(row: dict[str, Any], name: str, where: str) -> int:
    value = _value(row, name, where)
    if type(value) is not int or value < 1:
        raise BadTrace(f"{where}: {name}: a whole number from 1 is needed, not {_shown(value)}")
    return value


def _block_ids(row: dict[str, Any], where: str) -> list[int]:
    value = _value(row, "hash_ids", where)
    if not isinstance(value, list):
        raise BadTrace(f"{where}: hash_ids: a list is needed, not {_shown(value)}")
    for at, each in enumerate(value):
        if type(each) is not int:
            raise BadTrace(f"{where}: hash_ids[{at}]: a whole number is needed, not {_shown(each)}")
    return value


@dataclass(frozen=True, slots=True)
class _FirstUse:
    """The first use of a block id."""

    parent: int | None
    tokens: int
    line: int


def _check_uses(request: TraceRequest, block_tokens: int, uses: dict[int, _FirstUse], line: int, where: str) -> None:
    """Checks that each id always follows the same id, and always stands for the same number of tokens."""
    parent: int | None = None
    for at, block in enumerate(request.block_ids):
        tokens = min(block_tokens, request.input_tokens - at * block_tokens)
        first = uses.setdefault(block, _FirstUse(parent, tokens, line))
        if first.parent != parent:
            raise BadTrace(
                f"{where}: hash_ids[{at}]: {block} {_following(parent)} here, and {_following(first.parent)} in line "
                f"{first.line}; an id must stand for its block and all blocks before it"
            )
        if first.tokens != tokens:
            raise BadTrace(
                f"{where}: hash_ids[{at}]: {block} stands for {tokens} tokens here, and for {first.tokens} in line "
                f"{first.line}"
            )
        parent = block


def _following(parent: int | None) -> str:
    return "is the first" if parent is None else f"follows {parent}"


def _shown(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 40 else f"{text[:40]}…"
