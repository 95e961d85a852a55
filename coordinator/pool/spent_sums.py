"""What one gateway process has settled of budgets in one pool, until the store has it. No I/O.

The store is told sums over the life of this process, so a call that is lost, or runs twice, changes nothing. With each
sum goes what all gateways had settled when the store answered last: a store that was emptied is raised to that.

With a sum goes the budget's slice, if it has one: see slices.py. So what requests on it took is told when it is stated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.errors import StoreError
from coordinator.placement import Reservation, Used
from coordinator.pool.slices import Slice
from coordinator.spending import AccountBudget, Bill, Spent

_NO_LIFE = "-"
_KEPT_S = 86_400
"""How long a window is remembered when it is over."""
_AT_ONCE = 500
_SLICES_AT_ONCE = 64
"""To state a slice takes some 15 us of Redis' time. Placements of others run between the calls."""
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
    """By other gateways, and by this one in other pools, as the store told last."""
    slice: Slice = field(default_factory=Slice)

    @property
    def unsettled(self) -> int:
        return self.in_all - self.had + self.held

    @property
    def held_in_store(self) -> int:
        """What the store holds for this gateway."""
        return self.held - self.slice.in_flight + self.slice.in_store


class SpentSums:
    """Of one gateway in one pool, by the names of budgets."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._new: set[str] = set()
        """Those that the store has to be told."""
        self._sliced: set[str] = set()
        """Those whose slices have changed: the next heartbeat states them."""
        self._due: set[str] = set()
        """Those whose slices are to be stated before."""
        self._life = _NO_LIFE
        self._numbers = itertools.count(1)
        """Of calls."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the store has lost what it had."""
        self.on_due: Callable[[], None] = lambda: None
        """Called when a slice is half used."""

    def __repr__(self) -> str:
        return f"<SpentSums {len(self._sums)}, {len(self._new)} to tell>"

    def __len__(self) -> int:
        return len(self._sums)

    # -- requests ----------------------------------------------------------------------------------------------

    def cover(self, bill: Bill, prompt_tokens: int) -> int:
        """A request is to be placed. Returns since when (ms) slices of all its budgets hold what it can cost, until
        `uncover`; 0 if they have no room for it."""
        each = [(self._sum(budget), bill.most(budget, prompt_tokens), budget) for budget in bill.budgets]
        now_ms = _now_ms()
        have_room = [one.slice.begins(budget.limit, most, now_ms) for one, most, budget in each]
        if not all(have_room) or not bill.prompt_tokens:  # nobody knows what an unread prompt can cost
            self._sliced.update(budget.name for _, _, budget in each)
            return 0
        for one, most, budget in each:
            one.slice.take(most)
            if one.slice.is_half_used and budget.name not in self._due:
                self._due.add(budget.name)
                self.on_due()
        self._hold_on_slices(bill, prompt_tokens, now_ms, 1)
        return now_ms

    def uncover(self, bill: Bill, prompt_tokens: int, since_ms: int) -> None:
        """The store has answered: if the request is in flight now, `hold` says so."""
        self._hold_on_slices(bill, prompt_tokens, since_ms, -1)

    def _hold_on_slices(self, bill: Bill, uncached_tokens: int, since_ms: int, sign: int) -> None:
        for budget in bill.budgets:
            self._sum(budget).slice.hold(bill.most(budget, uncached_tokens), since_ms, sign)
            self._sliced.add(budget.name)

    def hold(self, one: Reservation, sign: int = 1) -> None:
        """A request is in flight; -1: it is over."""
        if one.bill is None:
            return
        for budget in one.bill.budgets:
            self._sum(budget).held += sign * one.bill.most(budget, one.uncached_tokens).amount
        if one.covered_ms:
            self._hold_on_slices(one.bill, one.uncached_tokens, one.covered_ms, sign)

    def forget_slices(self) -> None:
        """No request is in flight any more."""
        for one in self._sums.values():
            one.slice = Slice()

    def settle(self, bill: Bill, used: Used, is_covered: bool = False) -> None:
        """A request is over, and has taken this."""
        for budget in bill.budgets:
            amount = used.cost_nanos if budget.unit == "money" else used.limit_tokens
            if amount > 0:
                self._sum(budget).in_all += amount
                (self._sliced if is_covered else self._new).add(budget.name)

    # -- what is known -----------------------------------------------------------------------------------------

    def told(self, bill: Bill, spent: Sequence[Spent]) -> None:
        """The answer to a placement has told what is spent; it does not count as in flight yet."""
        for budget, each in zip(bill.budgets, spent, strict=True):
            one = self._sum(budget)
            one.elsewhere = max(0, each.held - one.held_in_store)
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

    def known(self, bill: Bill, uncached_tokens: int) -> tuple[Spent, ...]:
        """What is spent of each budget of a request in flight, and held by others, as far as this gateway knows."""
        ones = [(budget, self._sum(budget)) for budget in bill.budgets]
        return tuple(
            Spent(
                one.life,
                one.seen + one.in_all - one.had,
                max(0, one.elsewhere + one.held - bill.most(budget, uncached_tokens).amount),
            )
            for budget, one in ones
        )

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
                for names in (self._new, self._sliced, self._due):
                    names.discard(name)

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
        """The same of everything, with slices, in pieces. The first one may be empty."""
        self._forget_old()
        for told in (self._new, self._sliced, self._due):
            told.clear()
        names = [name for name, one in self._sums.items() if one.in_all or one.seen or one.slice.is_worth]
        return [self._text(names[start : start + _AT_ONCE], True) for start in range(0, len(names) or 1, _AT_ONCE)]

    def take_slices(self, *, all_changed: bool) -> list[tuple[str, Callable[[Any], None] | None]]:
        """The same, with slices, in pieces: with those that have changed, or only those that are half used."""
        names = list(self._sliced if all_changed else self._due)
        stated = [name for name in names if self._sums[name].slice.is_worth]
        for name in names:
            if not self._sums[name].slice.is_worth:
                self._sums[name].slice.begin_anew()
        for changed in (self._sliced, self._due):
            changed.difference_update(names)
        self._new.difference_update(stated)
        starts = range(0, len(stated), _SLICES_AT_ONCE)
        pieces: list[tuple[str, Callable[[Any], None] | None]] = [
            self._text(stated[start : start + _SLICES_AT_ONCE], True) for start in starts
        ]
        return [*pieces, self.take()] if self._new else pieces

    def _text(self, names: Iterable[str], with_slices: bool = False) -> tuple[str, Callable[[Any], None]]:
        number, now_ms, text, told = next(self._numbers), _now_ms(), "", dict[str, tuple[int, int]]()
        for name in names:
            one = self._sums[name]
            told[name] = one.in_all, one.slice.in_flight
            text += f" / {name} {one.life} {one.in_all} {one.had} {one.seen}"
            if with_slices and one.slice.is_worth:
                text += one.slice.state(number, now_ms)
        return text, lambda reply: self._heard(number, told, reply)

    def _heard(self, number: int, told: Mapping[str, tuple[int, int]], reply: Any) -> None:
        if isinstance(reply, StoreError):
            for names in (self._new, self._sliced):
                names.update(told.keys() & self._sums.keys())  # with the next heartbeat
            return
        life, *pairs = (word.decode("ascii", "replace") for word in reply)
        for text, amount in zip(pairs[::2], pairs[1::2], strict=True):
            kind, _, name = text.rpartition(" ")
            if (one := self._sums.get(name)) is None:
                continue
            in_all, in_flight = told[name]
            if kind == "slice":
                one.slice.heard(number, amount == "1", in_flight)
                if one.slice.room.amount:
                    self._sliced.add(name)  # to be given back if nothing comes
            elif kind == "held":
                one.elsewhere = max(0, int(amount) - one.held_in_store)
            else:
                if one.life == life:
                    one.had = max(in_all, one.had)
                elif number > one.seen_at:
                    one.had = in_all
                if number > one.seen_at:  # the answers to two calls may be heard in any order
                    one.seen, one.life, one.seen_at = int(amount), life, number
        self._lives(life)


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
