"""The stream of an open page of the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.console import routes
from gateway.control.decisions import Viewer


class Quiet:
    """A cluster, findings and decisions, of which there is nothing to tell."""

    async def look(self) -> bytes:
        return b"{}"

    def latest(self) -> bytes:
        return b""

    def recent(self) -> list[dict[str, Any]]:
        return []

    @contextmanager
    def watching(self, wanted: Mapping[str, str]) -> Iterator[Viewer]:
        yield Viewer(wanted)


async def test_an_open_page_is_told_nothing_more_when_its_session_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_CHECKED_S", 0.0)
    monkeypatch.setattr(routes, "_TICK_S", 0.0)
    answers: Iterator[Any] = iter([True, True, False])

    async def is_allowed() -> bool:
        return bool(next(answers))

    quiet: Any = Quiet()
    told = routes._live(routes.Shown(quiet, quiet, quiet), is_allowed, lambda: False)
    assert [event async for event in told] == [
        b"event: recent\ndata: []\n\n",
        b"event: cluster\ndata: {}\n\n",
    ]
    assert list(answers) == [], "it was asked until it said no"
