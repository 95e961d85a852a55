"""Requests that are not traced. It imports nothing of OpenTelemetry, so a gateway without traces has none of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Placed(Protocol):
    """An attempt's place."""

    replica: str
    url: str

    @property
    def decision(self) -> str: ...


class Untraced:
    """A request that nobody traces. Each method says what has happened to it."""

    is_traced = False

    def placing(self) -> None: ...

    def attempting(self, place: Placed) -> Mapping[str, str] | None:
        """It was placed, and is sent there. Returns the headers that the replica needs for its own spans; None if it
        gets those of the client."""
        return None

    def answered(self) -> None:
        """The first byte of its answer has come."""

    def passed(self, piece: bytes) -> None:
        """The client gets a piece of its answer."""

    def failed(self, reason: str) -> None:
        """The attempt is over, without an answer."""

    def end(self, kind: str | None, record: Mapping[str, Any]) -> None:
        """It is over. `kind` is that of its prompt."""


UNTRACED = Untraced()


class NotSampled(Untraced):
    """A request that is left out. Its replica leaves it out, too."""

    def __init__(self, traceparent: str) -> None:
        self._headers = {"traceparent": traceparent}

    def attempting(self, place: Placed) -> Mapping[str, str] | None:
        return self._headers
