"""Runs in a worker process: `python -m gateway.request.reading.worker_process`, started by `body_readers`.

Tasks come on standard input, one after the other, and answers go to standard output. A message has a header (its kind,
the length of its content, the length of its body), a content in MessagePack, and a body:

    in   TASK             a Task, and the body to read
    out  SCOPE_REQUEST    the path, and the model and cache_salt in the body
    in   SCOPES           the CacheScopes for these; None if the gateway has refused the request, which ends the task
    out  RESULT           a ParsedBody, and the body for the replica if it differs
    out  REFUSAL          the parts of an ApiError
    out  FAILURE          a bug: the name of an exception, and where it was raised

The process ends when its input ends. The input also ends when the gateway is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import struct
import traceback
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from gateway.errors import ApiError
from gateway.prompt import CacheScope, Steps
from gateway.prompt.steps import UNBOUNDED
from gateway.request.memory import give_memory_back
from gateway.request.reading.document import Body, BodyHead, BodyRules, read_body
from gateway.request.reading.model_field import model_span

MESSAGE_HEADER: Final = struct.Struct(">cIQ")
TASK, SCOPE_REQUEST, SCOPES, RESULT, REFUSAL, FAILURE = b"T", b"Q", b"S", b"R", b"X", b"F"

_INPUT, _OUTPUT = 0, 1
_PIPE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Task:
    """The content of a TASK message."""

    head: BodyHead
    rules: BodyRules


class _Refused(Exception):
    """The gateway has refused the request."""


def encode_message(kind: bytes, content: object, body: Body = b"") -> tuple[bytes, Body]:
    """A message in two pieces: its header with its content, and its body."""
    encoded = msgspec.msgpack.encode(content)
    return MESSAGE_HEADER.pack(kind, len(encoded), len(body)) + encoded, body


def main() -> None:
    """Reads tasks until the input ends."""
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # the gateway may still serve requests, and ends this process
        signal.signal(stop_signal, signal.SIG_IGN)
    gc.disable()  # parsed JSON has no cycles
    while header := _read_exactly(MESSAGE_HEADER.size):
        _, content_bytes, body_bytes = MESSAGE_HEADER.unpack(header)
        task = msgspec.msgpack.decode(_read_exactly(content_bytes), type=Task)
        _run(task, _read_exactly(body_bytes))
        give_memory_back()


def _run(task: Task, body: Body) -> None:
    try:
        parsed = read_body(task.head, body, task.rules, _request_scopes, Steps(UNBOUNDED))
        if parsed.model is not None and parsed.model_at is None:
            parsed.model_at = model_span(body if parsed.body is None else parsed.body)
        del body
        changed = parsed.body
        _write(RESULT, replace(parsed, body=None), changed or b"")
    except _Refused:
        pass
    except ApiError as error:
        _write(REFUSAL, (error.status, error.code, error.message, error.param, error.headers))
    except Exception as error:
        # Not the exception's text, because it may hold a piece of the prompt.
        raised = traceback.extract_tb(error.__traceback__)[-1]
        _write(FAILURE, f"{type(error).__name__} at {raised.filename}:{raised.lineno}")


def _request_scopes(path: str, model: str | None, cache_salt: str | None) -> list[CacheScope]:
    _write(SCOPE_REQUEST, (path, model, cache_salt))
    _, content_bytes, _ = MESSAGE_HEADER.unpack(_read_exactly(MESSAGE_HEADER.size))
    scopes = msgspec.msgpack.decode(_read_exactly(content_bytes), type=list[CacheScope] | None)
    if scopes is None:
        raise _Refused
    return scopes


def _write(kind: bytes, content: object, body: Body = b"") -> None:
    for piece in encode_message(kind, content, body):
        left = memoryview(piece)
        while left:
            left = left[os.write(_OUTPUT, left[:_PIPE_BYTES]) :]


def _read_exactly(count: int) -> bytearray:
    """The next `count` bytes of the input; no bytes if the input has ended."""
    data = bytearray(count)
    view, position = memoryview(data), 0
    while position < count:
        read = os.readv(_INPUT, [view[position:]])
        if read == 0:
            return bytearray()
        position += read
    return data


if __name__ == "__main__":
    main()
