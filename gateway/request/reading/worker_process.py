"""What runs in a process that reads bodies: `python -m gateway.request.reading.worker_process`, started by `workers`.

On its standard input come tasks, on its standard output go answers, one after the other. Each message is a head (its
kind, the length of its MessagePack, the length of the body behind it) and those two parts:

    in   TASK      a Task, and the body to read
    out  SCOPE_REQUEST  the path, and the model and cache_salt that the body names: what is the engine's view of them?
    in   SCOPE    an Engine; None: the gateway has refused the request, read no further
    out  RESULT   a ParsedBody, and the body for the replica where that changes
    out  REFUSAL   the parts of an ApiError
    out  FAILURE   the name of an exception and where it was raised: a bug

It ends when its input does, as it does when the gateway is gone.
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

MESSAGE_HEADER: Final = struct.Struct(">cIQ")
TASK, SCOPE_REQUEST, SCOPE, RESULT, REFUSAL, FAILURE = b"T", b"Q", b"E", b"R", b"X", b"F"

_INPUT, _OUTPUT = 0, 1
_PIPE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Task:
    """What comes with a body that is to be read."""

    head: BodyHead
    rules: BodyRules


class _Refused(Exception):
    """The gateway has answered the request already."""


def encode_message(kind: bytes, content: object, body: Body = b"") -> tuple[bytes, Body]:
    """A message: its head with what it says, and the body behind that."""
    encoded = msgspec.msgpack.encode(content)
    return MESSAGE_HEADER.pack(kind, len(encoded), len(body)) + encoded, body


def main() -> None:
    """Read tasks until the input ends."""
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # the gateway says when: it may have requests to end
        signal.signal(stop_signal, signal.SIG_IGN)
    gc.disable()  # parsed JSON has no cycles
    while header := _read_exactly(MESSAGE_HEADER.size):
        _, content_bytes, body_bytes = MESSAGE_HEADER.unpack(header)
        task = msgspec.msgpack.decode(_read_exactly(content_bytes), type=Task)
        _run(task, _read_exactly(body_bytes))
        give_memory_back()


def _run(task: Task, body: Body) -> None:
    try:
        parsed = read_body(task.head, body, task.rules, _request_scope, Steps(UNBOUNDED))
        del body
        changed = parsed.body
        _write(RESULT, replace(parsed, body=None), changed or b"")
    except _Refused:
        pass
    except ApiError as error:
        _write(REFUSAL, (error.status, error.code, error.message, error.param, error.headers))
    except Exception as error:
        # Where, not what: an exception's text may hold a piece of the prompt.
        raised = traceback.extract_tb(error.__traceback__)[-1]
        _write(FAILURE, f"{type(error).__name__} at {raised.filename}:{raised.lineno}")


def _request_scope(path: str, model: str | None, cache_salt: str | None) -> CacheScope:
    _write(SCOPE_REQUEST, (path, model, cache_salt))
    _, content_bytes, _ = MESSAGE_HEADER.unpack(_read_exactly(MESSAGE_HEADER.size))
    scope = msgspec.msgpack.decode(_read_exactly(content_bytes), type=CacheScope | None)
    if scope is None:
        raise _Refused
    return scope


def _write(kind: bytes, content: object, body: Body = b"") -> None:
    for part in encode_message(kind, content, body):
        left = memoryview(part)
        while left:
            left = left[os.write(_OUTPUT, left[:_PIPE_BYTES]) :]


def _read_exactly(count: int) -> bytearray:
    """So many bytes of the input; none at its end."""
    taken = bytearray(count)
    view, position = memoryview(taken), 0
    while position < count:
        read = os.readv(_INPUT, [view[position:]])
        if read == 0:
            return bytearray()
        position += read
    return taken


if __name__ == "__main__":
    main()
