"""What one gateway process has settled of budgets in one pool, until the store has it. No I/O.

The store is told sums over the life of this process, so a call that is lost, or runs twice, changes nothing. With each
sum goes what all gateways had settled when the store answered last: a store that was emptied is raised to that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.errors import StoreError
from coordinator.placement import Reservation, Used
from coordinator.spending import AccountBudget, Bill, Spent

_NO_LIFE = "-"
_KEPT_S = 86_400
"""How long a window is remembered when it is over."""
_AT_ONCE = 500
_LOOKED_AT = 256
"""Windows that are over are looked for each so many new ones."""


@dataclass(slots=True)
class _Sum:
    ends_s: int
    life: str = _NO_LIFE
    """Of the store's hash that has `had`."""
    in_all: int = 0
    had: int = 0
    """The part of it that the store has."""
    seen: int = 0
    """What all gateways have settled, as the store told last. It may have become less: a dead gateway has come back."""
    seen_at: int = 0
    """The number of the call that has told this."""
    held: int = 0
    """By requests of this gateway in flight."""
    elsewhere: int = 0
    """By those of other gateways, as the store told last."""

    @property
    def unsettled(self) -> int:
        return self.in_all - self.had + self.held


class SpentSums:
    """Of one gateway in one pool, by the names of budgets."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._new: set[str] = set()
        """Those that the store has to be told."""
        self._life = _NO_LIFE
        self._numbers = itertools.count(1)
        """Of calls."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the store has lost what it had."""

    def __repr__(self) -> str:
        return f"<SpentSums {len(self._sums)}, {len(self._new)} to tell>"

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def has_new(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._new)

    def hold(self, one: Reservation, sign: int = 1) -> None:
        """A request is in flight; -1: it is over."""
        for budget in one.bill.budgets if one.bill is not None else ():
            assert one.bill is not None
            self._sum(budget).held += sign * one.bill.most(budget, one.uncached_tokens).amount

    def settle(self, bill: Bill, used: Used) -> None:
        """A request is over, and has taken this."""
        for budget in bill.budgets:
            amount = used.cost_nanos if budget.unit == "money" else used.limit_tokens
            if amount > 0:
                self._sum(budget).in_all += amount
                self._new.add(budget.name)

    def told(self, bill: Bill, spent: tuple[Spent, ...]) -> None:
        """The answer to a placement has told what is spent."""
        for budget, each in zip(bill.budgets, spent, strict=True):
            one = self._sum(budget)
            if each.life == one.life or (one.life == _NO_LIFE and not one.had):
                one.life, one.seen = each.life, max(one.seen, each.settled)
        if spent:
            self._lives(spent[0].life)

    def _lives(self, life: str) -> None:
        """This is the life of the store's hash now. If it has another one, it was lost."""
        was_lost, self._life = self._life not in (_NO_LIFE, life), life
        if was_lost:
            self.on_lost()

    def seen(self, budget: AccountBudget) -> int | None:
        """What all gateways have settled of a budget, as the store told last; None if it has told nothing."""
        one = self._sums.get(budget.name)
        return one.seen if one is not None and one.life != _NO_LIFE else None

    def told_held(self, budget: AccountBudget, told: int, own: int) -> None:
        """A placement has told what is held of a budget. `own` is what this gateway holds, in all pools."""
        self._sum(budget).elsewhere = max(0, told - own)

    def held(self, budget: AccountBudget) -> int:
        """What requests of this gateway in flight can cost."""
        one = self._sums.get(budget.name)
        return one.held if one is not None else 0

    def elsewhere(self, budget: AccountBudget) -> int:
        """The same of other gateways, as the store told last."""
        one = self._sums.get(budget.name)
        return one.elsewhere if one is not None else 0

    def unsettled(self, budget: AccountBudget) -> int:
        """What this gateway has spent since, and what its requests in flight can cost."""
        one = self._sums.get(budget.name)
        return one.unsettled if one is not None else 0

    def _sum(self, budget: AccountBudget) -> _Sum:
        one = self._sums.get(budget.name)
        if one is None:
            if len(self._sums) % _LOOKED_AT == _LOOKED_AT - 1:
                self._forget_old()
            one = self._sums[budget.name] = _Sum(budget.ends_s)
        return one

    def _forget_old(self) -> None:
        over_s = time.time() - _KEPT_S
        for name, one in list(self._sums.items()):
            if one.ends_s < over_s and not one.unsettled:
                del self._sums[name]
                self._new.discard(name)

    # -- what the store is told --------------------------------------------------------------------------------

    def take(self) -> tuple[str, Callable[[Any], None] | None]:
        """What is new, as `settle` takes it, and whom to give the reply; "" and None if nothing is. If very much is, a
        later call takes the rest."""
        if not self._new:
            return "", None
        names = set(itertools.islice(self._new, _AT_ONCE))
        self._new -= names
        return self._text(names)

    def take_all(self) -> list[tuple[str, Callable[[Any], None]]]:
        """The same of everything, in pieces. The first one may be empty."""
        self._forget_old()
        self._new.clear()
        names = [name for name, one in self._sums.items() if one.in_all or one.seen]
        return [self._text(names[start : start + _AT_ONCE]) for start in range(0, len(names) or 1, _AT_ONCE)]

    def _text(self, names: Iterable[str]) -> tuple[str, Callable[[Any], None]]:
        told = {name: self._sums[name].in_all for name in names}
        sums = ((name, self._sums[name]) for name in told)
        text = "".join(f" / {name} {one.life} {one.in_all} {one.had} {one.seen}" for name, one in sums)
        number = next(self._numbers)
        return text, lambda reply: self._heard(number, told, reply)

    def _heard(self, number: int, told: Mapping[str, int], reply: Any) -> None:
        if isinstance(reply, StoreError):
            self._new |= told.keys() & self._sums.keys()  # with the next heartbeat
            return
        life, *settled = (word.decode("ascii", "replace") for word in reply)
        for name, seen in zip(settled[::2], settled[1::2], strict=True):
            if (one := self._sums.get(name)) is None:
                continue
            if one.life == life:
                one.had = max(told[name], one.had)
            elif number > one.seen_at:
                one.had = told[name]
            if number > one.seen_at:  # the answers to two calls may be heard in any order
                one.seen, one.life, one.seen_at = int(seen), life, number
        self._lives(life)
