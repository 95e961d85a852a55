"""Messages of APIs that vLLM translates into chat messages, in the same stream as those.

A `Turn` is one chat message to be. Its values keep the field they came from, for errors that name what
the client sent rather than what it was translated to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.prompt import stream as tags
from gateway.prompt.chat import KEYED_MESSAGES
from gateway.prompt.fields import Json, utf8
from gateway.prompt.writer import PromptWriter

WritePart = Callable[[], object]
"""Writes one part of a message's content."""


class Named(NamedTuple):
    """A value with the field that names it in errors."""

    value: Json
    param: str


class ToolCall(NamedTuple):
    """An assistant's call."""

    name: Named
    call_id: Named
    arguments: Named


@dataclass(slots=True)
class Turn:
    """One chat message to be."""

    role: Named
    call_id: Named | None = None
    reasoning: bytearray | None = None
    parts: list[WritePart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


def write_turns(writer: PromptWriter, turns: list[Turn]) -> None:
    """Write the turns as chat messages, with the same keys."""
    first_keyed = len(turns) - KEYED_MESSAGES
    for index, turn in enumerate(turns):
        writer.open_message(*turn.role)
        if turn.call_id is not None:
            writer.optional_field(tags.CALL_ID, *turn.call_id)
        if turn.reasoning is not None:
            writer.stream.text(bytes(turn.reasoning), tags.REASONING)
        for write_part in turn.parts:
            write_part()
        for call in turn.calls:
            writer.stream.field(tags.CALL, utf8(*call.name))
            writer.optional_field(tags.CALL_ID, *call.call_id)
            writer.arguments(*call.arguments)
        writer.close_message(keyed=index >= first_keyed)
