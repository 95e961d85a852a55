"""What runs in a process that reads bodies: `python -m gateway.request.reading.process`, started by `workers`.

On its standard input come tasks, on its standard output go answers, one after the other. Each message is a head (its
kind, the length of its MessagePack, the length of the body behind it) and those two parts:

    in   TASK      a Task, and the body to read
    out  QUESTION  the path, and the model and cache_salt that the body names: what is the engine's view of them?
    in   ENGINE    an Engine; None: the gateway has refused the request, read no further
    out  READING   a Reading, and the body for the replica where that changes
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
from gateway.request.reading.document import Ask, Body, Rules, read_body

HEAD: Final = struct.Struct(">cIQ")
TASK, QUESTION, ENGINE, READING, REFUSAL, FAILURE = b"T", b"Q", b"E", b"R", b"X", b"F"

_INPUT, _OUTPUT = 0, 1
_PIPE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Task:
    """What comes with a body that is to be read."""

    ask: Ask
    rules: Rules


class _Refused(Exception):
    """The gateway has answered the request already."""


def message(kind: bytes, content: object, body: Body = b"") -> tuple[bytes, Body]:
    """A message: its head with what it says, and the body behind that."""
    told = msgspec.msgpack.encode(content)
    return HEAD.pack(kind, len(told), len(body)) + told, body


def main() -> None:
    """Read tasks until the input ends."""
    for told_to_stop in (signal.SIGINT, signal.SIGTERM):  # the gateway says when: it may have requests to end
        signal.signal(told_to_stop, signal.SIG_IGN)
    gc.disable()  # parsed JSON has no cycles
    while head := _take(HEAD.size):
        _, told_bytes, body_bytes = HEAD.unpack(head)
        task = msgspec.msgpack.decode(_take(told_bytes), type=Task)
        _answer(task, _take(body_bytes))
        give_memory_back()


def _answer(task: Task, body: Body) -> None:
    try:
        reading = read_body(task.ask, body, task.rules, _ask, Steps(UNBOUNDED))
        del body
        changed = reading.body
        _send(READING, replace(reading, body=None), changed or b"")
    except _Refused:
        pass
    except ApiError as error:
        _send(REFUSAL, (error.status, error.code, error.message, error.param, error.headers))
    except Exception as error:
        # Where, not what: an exception's text may hold a piece of the prompt.
        place = traceback.extract_tb(error.__traceback__)[-1]
        _send(FAILURE, f"{type(error).__name__} at {place.filename}:{place.lineno}")


def _ask(path: str, model: str | None, cache_salt: str | None) -> CacheScope:
    _send(QUESTION, (path, model, cache_salt))
    _, told_bytes, _ = HEAD.unpack(_take(HEAD.size))
    engine = msgspec.msgpack.decode(_take(told_bytes), type=CacheScope | None)
    if engine is None:
        raise _Refused
    return engine


def _send(kind: bytes, content: object, body: Body = b"") -> None:
    for part in message(kind, content, body):
        left = memoryview(part)
        while left:
            left = left[os.write(_OUTPUT, left[:_PIPE_BYTES]) :]


def _take(count: int) -> bytearray:
    """So many bytes of the input; none at its end."""
    taken = bytearray(count)
    view, place = memoryview(taken), 0
    while place < count:
        read = os.readv(_INPUT, [view[place:]])
        if read == 0:
            return bytearray()
        place += read
    return taken


if __name__ == "__main__":
    main()
