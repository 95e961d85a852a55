"""`kvgate explain` waits a little for the record of a request that ended just now."""

from __future__ import annotations

import pytest

from gateway.ops.cli.ask import NotFound
from gateway.ops.cli.explain import found_soon
from gateway.ops.errors import CommandError


class Looking:
    """Raises an error until so many waits are over."""

    def __init__(self, error: CommandError, most_waits: int) -> None:
        self.error, self.most_waits = error, most_waits
        self.waits: list[float] = []

    def __call__(self) -> str:
        if len(self.waits) < self.most_waits:
            raise self.error
        return "found"


def test_a_record_that_comes_a_little_later_is_found() -> None:
    look = Looking(NotFound("not yet"), 3)
    assert found_soon(look, look.waits.append) == "found"


def test_a_record_that_does_not_come_is_waited_for_about_two_seconds() -> None:
    look = Looking(NotFound("none"), 1000)
    with pytest.raises(NotFound, match="none"):
        found_soon(look, look.waits.append)
    assert 1.5 <= sum(look.waits) <= 3, "gateways send records once a second"


def test_another_refusal_is_told_at_once() -> None:
    look = Looking(CommandError("no key"), 1000)
    with pytest.raises(CommandError, match="no key"):
        found_soon(look, look.waits.append)
    assert look.waits == []
