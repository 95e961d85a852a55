"""Checks bodies against the types of protocol.py. As in vLLM, this is pydantic's lax mode (`"4"` is a number, `"yes"`
is true), and errors have the text of vLLM's handler of pydantic's errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gateway.simulator.errors import UNREADABLE, RequestRefused

_MAX_REPORTED = 10
_MAX_INPUT_CHARS = 200
_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
"""pydantic's names of the branches of a union in an error's path. vLLM leaves them out."""

_Checked = TypeVar("_Checked")
Parse = Callable[[dict[str, Any]], dict[str, Any]]


def parser(request_type: Any) -> Parse:
    """Checks a body against a type. Returns it with converted fields, or raises a 400."""
    adapter = TypeAdapter(request_type)
    return lambda body: {**body, **checked(adapter, body)}  # in the order of the body


def checked(adapter: TypeAdapter[_Checked], body: object) -> _Checked:
    """The body in the adapter's type. Raises a 400."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from error


def unread(body: dict[str, Any]) -> dict[str, Any]:
    """For endpoints that read their few fields themselves (gateway/simulator/fields.py)."""
    return body


def unreadable(kind: str, loc: tuple[int | str, ...], message: str, value: object) -> RequestRefused:
    """The 400 for a body that is no object, with the same text."""
    return _refusal([ErrorDetails(type=kind, loc=loc, msg=message, input=value)])


def _refusal(errors: Sequence[ErrorDetails]) -> RequestRefused:
    """The 400 for a body of a wrong type, with the text of vLLM's handler of pydantic's errors."""
    param = _path(errors[0]["loc"])
    lines = [str({**error, "loc": _path(error["loc"]), "input": _shown(error["input"])}) for error in errors]
    word = "error" if len(errors) == 1 else "errors"
    message = f"{len(errors)} validation {word}:\n" + "\n".join(f"  {line}" for line in lines[:_MAX_REPORTED])
    if len(errors) > _MAX_REPORTED:
        message += f"\n  ...and {len(errors) - _MAX_REPORTED} more {word}"
    return RequestRefused(400, message, param, UNREADABLE)


def _path(loc: Sequence[int | str]) -> str:
    parts = (str(part) for part in loc)
    return ".".join(["body", *(part for part in parts if "[" not in part and part not in _BRANCHES)])


def _shown(value: object) -> str:
    """A value as an error quotes it. Of a list or an object, only the length is quoted."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_INPUT_CHARS else text[:_MAX_INPUT_CHARS] + "...[truncated]"
