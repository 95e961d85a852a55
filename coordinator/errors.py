"""What can go wrong with the store. redis-py's exceptions stop in this package."""

from __future__ import annotations

from typing import Literal

from coordinator.accounts import Left
from coordinator.spending import AccountBudget, Spent


class StoreError(Exception):
    """The store could not answer. A missing value is never reported this way."""


class StoreDown(StoreError):
    """There is no usable connection: the call was not answered and may or may not have run."""


class StoreLate(StoreError):
    """No answer within the caller's budget: the call may still run. `cause` says what took the time: `redis`, or the
    `gateway` itself."""

    def __init__(self, message: str, cause: Literal["redis", "gateway"] = "redis") -> None:
        super().__init__(message)
        self.cause = cause


class StoreRefused(StoreError):
    """Redis answered with an error (a missing permission, a wrong type): retrying will not help."""

    @property
    def is_wrong_type(self) -> bool:
        """Whether the key is of another type: somebody else wrote there."""
        return "WRONGTYPE" in str(self)

    @property
    def is_full(self) -> bool:
        """Whether Redis' memory is full, and it cannot evict anything."""
        return "OOM" in str(self)


class Refused(Exception):
    """A request is not placed, and why."""


class NoRoom(Refused):
    """No replica has room for a request, and it may not wait, or has waited for too long.

    `reason` is `full` (too many wait), `full_tenant` (too many of this tenant do), `unreachable` (it would wait longer
    than it can) or `waited` (it has); of a second attempt `no_replica`, `no_room`, `later` or `withheld`. `expected_s`
    is how long another try most likely waits; 0 if nothing tells.
    """

    def __init__(self, reason: str, expected_s: float) -> None:
        super().__init__(f"no replica has room ({reason}); expected wait {expected_s:.1f} s")
        self.reason, self.expected_s = reason, expected_s


class OverLimit(Refused):
    """An account has used up its `requests` or `tokens` of a minute; `limit` says which, and `at` which one of the
    request's accounts. In `wait_s` it has some again. `left` is what is left of each account."""

    def __init__(self, limit: str, wait_s: float, left: tuple[Left, ...], at: int) -> None:
        super().__init__(f"too many {limit} in a minute; some again in {wait_s:.1f} s")
        self.limit, self.wait_s, self.left, self.at = limit, wait_s, left, at


class OverBudget(Refused):
    """A request may cost more than is left of a budget. `of` has its budgets, what is spent of them, and the most that
    the request can take. `is_local`: of this gateway's part, while the store is away."""

    def __init__(self, of: list[tuple[AccountBudget, Spent, int]], *, is_local: bool = False) -> None:
        super().__init__("a budget has too little left")
        self.of, self.is_local = of, is_local

    def blocking(self) -> tuple[AccountBudget, Spent, int, bool]:
        """The budget that is in the way for longest, and whether what is settled alone is: else requests in flight
        are."""
        blocking = (
            (budget, spent, most, spent.settled + most > budget.limit)
            for budget, spent, most in self.of
            if most > 0 and spent.settled + spent.held + most > budget.limit
        )
        return max(blocking, key=lambda each: (each[3], each[0].ends_s))
