"""What each grammar can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from gateway.relay.progress import Progress


class Grammar(ABC):
    """The events of one stream: those that its client has got are taken, those of the rest are written. Methods raise
    NotResumable for what the rest of a stream could not be joined to."""

    is_chat: ClassVar[bool] = False
    """Whether the rest is asked for as a chat, whatever the API."""
    always_tells_usage: ClassVar[bool] = True
    """Whether each stream ends with its usage, asked or not."""

    def __init__(self, model: str) -> None:
        self.progress = Progress()
        self._model = model

    @staticmethod
    def chat(document: dict[str, Any]) -> dict[str, Any]:
        """The body of a request of this API as that of a chat with the same prompt and the same limits."""
        return document

    @staticmethod
    def other_chat(document: dict[str, Any]) -> dict[str, Any] | None:
        """That chat for a model whose template refuses the first one. None if there is only one."""
        return None

    @abstractmethod
    def take(self, event: Mapping[str, Any]) -> None:
        """One more event that the client has got."""

    @abstractmethod
    def take_part(self, text: Any, numbers: list[int] | None) -> None:
        """An event of the usual form, of which only the text is kept, and the numbers that differ."""

    @abstractmethod
    def part(self, text: str, choice: Mapping[str, Any], document: Mapping[str, Any], *, calls_tools: bool) -> bytes:
        """The events for more text, which `choice` of `document` has brought, and perhaps for its finish reason."""

    @abstractmethod
    def usage(self, usage: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
        """The events for the usage of the whole answer, in the words of a chat."""

    @abstractmethod
    def end(self, comment: bytes) -> bytes:
        """The end of the stream, and before its last event this comment."""


def named(kind: str, document: Mapping[str, Any]) -> bytes:
    """An event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))
