"""Messages of APIs whose input vLLM translates to chat messages; they are written as these chat messages.

A `Turn` becomes one chat message. Its values keep the name of their field, so that errors name the field that the
client sent.
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
    """A value, and the name of its field for errors."""

    value: Json
    param: str


class ToolCall(NamedTuple):
    """A tool call of the assistant."""

    name: Named
    call_id: Named
    arguments: Named


@dataclass(slots=True)
class Turn:
    """A future chat message."""

    role: Named
    call_id: Named | None = None
    reasoning: bytearray | None = None
    parts: list[WritePart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


def write_turns(writer: PromptWriter, turns: list[Turn]) -> None:
    """Write the turns as chat messages. They have the keys of the same messages sent to the chat API."""
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
