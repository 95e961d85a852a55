"""A driver's loop: it reads calls as lines of JSON, and writes the outcome of each call as lines of JSON.

In: {"call", "url", "key", "headers", "model", "prompt", "tokens"}. Out: {"begun": true} at the first piece of a
stream, then {"value": …} (for a stream, the list of its pieces) or {"raised": …}, the description of an exception.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_OUT = sys.stdout
sys.stdout = sys.stderr  # output that libraries print must not mix with ours


@dataclass(frozen=True)
class Question:
    model: str
    prompt: str
    tokens: int
    """The most tokens that the answer may have."""


Connect = Callable[[str, str, dict[str, str]], Any]
"""Makes a client from a gateway's URL, an API key and headers to send."""


def serve(connect: Connect, **calls: Callable[[Any, Question], Any]) -> None:
    """Answer until the input ends. A call returns a value, or an iterator of a stream's pieces."""
    for line in sys.stdin:
        told = json.loads(line)
        try:
            client = connect(told["url"], told["key"], told["headers"])
            question = Question(told["model"], told["prompt"], told["tokens"])
            _say(value=_value(calls[told["call"]](client, question)))
        except Exception as error:
            _say(raised=_described(error))


def _value(found: Any) -> Any:
    if not isinstance(found, Iterator):
        return found
    pieces = []
    for piece in found:
        if not pieces:
            _say(begun=True)
        pieces.append(piece)
    return pieces


def _described(error: Exception) -> dict[str, Any]:
    return {
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "status": getattr(error, "status_code", None),
        "request_id": getattr(error, "request_id", None),
    }


def _say(**fields: Any) -> None:
    print(json.dumps(fields), file=_OUT, flush=True)
