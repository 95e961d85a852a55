"""The stream of an open page of the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest

from gateway.console import routes
from gateway.console.cluster import ClusterView
from gateway.control.decisions import Decisions, Viewer


class Quiet:
    """A cluster, and decisions, of which there is nothing to tell."""

    async def look(self) -> bytes:
        return b"{}"

    @contextmanager
    def watching(self, wanted: Mapping[str, str]) -> Iterator[Viewer]:
        yield Viewer(wanted)


async def test_an_open_page_is_told_nothing_more_when_its_session_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_CHECKED_S", 0.0)
    monkeypatch.setattr(routes, "_TICK_S", 0.0)
    answers: Iterator[Any] = iter([True, True, False])

    async def is_allowed() -> bool:
        return bool(next(answers))

    quiet = Quiet()
    told = routes._live(cast("ClusterView", quiet), cast("Decisions", quiet), is_allowed, lambda: False)
    assert [event async for event in told] == [b"event: cluster\ndata: {}\n\n"]
    assert list(answers) == [], "it was asked until it said no"
