"""What `place` is asked, and how it is answered. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from coordinator.accounts import Budget, Left, Limits, account_of_tenant
from coordinator.errors import NoRoom, OverBudget, OverLimit, Refused
from coordinator.keys import PoolKeys
from coordinator.policy_knobs import PolicyKnobs
from coordinator.registry import SESSION, TOLD, ReplicaRecord
from coordinator.scripts import Script, signature
from coordinator.spending import Bill, Spent
from coordinator.subset import Subset

_PLACE = signature("place")
_KEY_AT = {one.name: at for at, one in enumerate(_PLACE.keys, 1)}
_ARGUMENT_AT = {one.name: at for at, one in enumerate(_PLACE.args, 1)}
NO_TIP = "-"
"""The tip of a request that has no chain."""


class Standing(NamedTuple):
    """Where a request stands in the queue, if it has to wait."""

    band: int = 0
    """0 goes first."""
    tenant: str = "-"
    weight: float = 1.0
    output_tokens: int = 0
    """The charge for its answer: tokens, times their weight."""
    since_ms: int = 0
    """Redis time at which its wait began; 0: now."""
    wait_ms: int = 0
    """How long it can wait in all; 0: any time."""
    starve_ms: int = 0
    """If its band gets nothing for so long, it goes first once; 0: at once."""

    def line(self, waited_s: float) -> str:
        """As `place` takes it, for a request that has waited already."""
        left_ms = max(1, int(self.wait_ms - waited_s * 1000)) if self.wait_ms else 0
        times = f"{self.since_ms} {left_ms} {self.starve_ms}"
        return f"{self.band} {self.tenant_text} {self.weight:g} {self.output_tokens} {times}"

    @property
    def tenant_text(self) -> str:
        """The tenant's name in keys and records."""
        return account_of_tenant(self.tenant)


class Seat(NamedTuple):
    """A request has to wait. `expected_ms` is how long it most likely waits; 0 if nothing tells. `room` is a replica
    that has room for one of those that come before it; "" if there is none."""

    since_ms: int
    expected_ms: int
    room: str = ""


class Prefill(NamedTuple):
    """A request may be prefilled elsewhere than it is decoded, by one of these replicas, if so many tokens of its
    prompt are missing where it is decoded."""

    serving: Subset
    least_tokens: int
    except_at: tuple[str, ...] = ()
    """The replicas that compute their prompts themselves."""
    needed_at: tuple[str, ...] = ()
    """The replicas that never do, however little is missing."""


class Used(NamedTuple):
    """The tokens that a request took."""

    charge_tokens: int
    """Of its tenant's share: uncached tokens, and those of the answer, weighted."""
    limit_tokens: int
    """Of its accounts' limits: uncached tokens, and those of the answer."""
    cost_nanos: int = 0

    @property
    def text(self) -> str:
        """As `settle` takes it."""
        return f"{self.charge_tokens} {self.limit_tokens}"


NOTHING = Used(0, 0)


@dataclass(slots=True)  # not frozen, which would make it four times as slow to make
class PlaceRequest:
    """What `place` decides on. `keys` (32 hex) and `tokens` (behind each key) run shallow to deep.

    While it is placed, a request changes only by its methods (`has_seat` to `must_not_wait`).
    """

    reservation: str
    keys: Sequence[str]
    tokens: Sequence[int]
    prompt_tokens: int
    knobs: PolicyKnobs
    seed: int
    tried: Sequence[str] = ()
    release: str = ""
    """The reservation of the attempt that just failed; it is given back in the same step."""
    pinned: str = ""
    """The only replica allowed; empty for any."""
    serving: Subset | None = None
    """The replicas that serve the model; None for all that the gateway knows."""
    order: Sequence[str] = field(default=())
    """The first replicas of the rendezvous order, for consistent_hash."""
    may_report: bool = False
    """Whether the engine can be asked, with this request, to report the blocks that it reuses."""
    shape: bytes = b"{}"
    """The parts of the prompt up to each key, for the agents: JSON without spaces (see coordinator/README.md)."""
    is_streamed: bool = True
    """Whether its first token will be seen."""
    room_share: float = 0.0
    """The part of a replica's room that it may use; 0: it never waits for room."""
    standing: Standing = field(default_factory=Standing)
    """Where it waits if there is no room."""
    limits: Limits | None = None
    """Those of its accounts; None if it has none."""
    bill: Bill | None = None
    """What it can cost; None if its accounts have no budgets."""
    covered_ms: int = 0
    """Since when slices of its budgets hold that; 0: they do not, or it has none."""
    waited_s: float = 0.0
    """How long it has waited for room."""
    is_counted: bool = False
    """Whether the store has counted it for its limits: an attempt before, in another pool, or a placement that
    came too late."""
    hedge: tuple[float, int] | None = None
    """Of a second attempt beside a late one: the share of all tokens that may be computed twice, and so many tokens
    may be computed until its first byte comes. It never waits for room."""
    prefill: Prefill | None = None
    """None if it is prefilled where it is decoded."""
    affinity: bytes = b""
    """The bytes that rendezvous hashing hashes while the store is away; the store does not get them."""
    answer: tuple[int, int] = (0, 0)
    """The last answer in the prompt: how many keys come before it, and how many up to its end; zeros if there is
    none."""

    @property
    def tip(self) -> str:
        return self.keys[-1] if self.keys else NO_TIP

    def has_seat(self, since_ms: int) -> None:
        """It waits for room, since this Redis time. It keeps that place if it has to be asked again."""
        self.standing = self.standing._replace(since_ms=since_ms)

    def has_waited(self, waited_s: float) -> None:
        """In all."""
        self.waited_s = waited_s

    def is_served_by(self, subset: Subset) -> None:
        """Replicas have come or gone."""
        self.serving = subset

    def has_released(self) -> None:
        """The attempt before holds no load any more."""
        self.release = ""

    def has_counted(self) -> None:
        """The store has counted it for its limits."""
        self.is_counted = True

    def must_not_wait(self) -> None:
        """It is placed at once, though there is no room."""
        self.room_share = 0.0
        self.limits = self.limits and self.limits.without_concurrency()

    def is_covered(self, since_ms: int) -> None:
        """Slices of its budgets hold what it can cost; 0: they do not."""
        self.covered_ms = since_ms

    @property
    def prefill_reservation(self) -> str:
        """The name of the reservation at the replica that prefills for it."""
        return f"{self.reservation}p"

    def of_prefill(self) -> PlaceRequest:
        """The part of it that is a prefill elsewhere. It takes no limits and budgets: the request has them."""
        assert self.prefill is not None
        return replace(
            self,
            reservation=self.prefill_reservation,
            serving=self.prefill.serving,
            prefill=None,
            release="",
            limits=None,
            bill=None,
            covered_ms=0,
            is_streamed=False,
        )

    def _pair(self, keys: PoolKeys) -> str:
        """How `place` is run for the prefill: see lua/lib/pair.lua."""
        if self.prefill is None:
            return ""
        digest = self.prefill.serving.digest
        changed = {"digest": digest, "reservation": self.prefill_reservation}
        changed |= dict.fromkeys(("release", "pinned", "order", "line", "limits", "bill"), "")
        told = {
            "least_tokens": self.prefill.least_tokens,
            "subset_at": _KEY_AT["subset"],
            "subset": keys.subset(digest),
            "arguments": [each for name, value in changed.items() for each in (_ARGUMENT_AT[name], value)],
            "tried_at": _ARGUMENT_AT["tried"],
            "except_at": self.prefill.except_at,
            "needed_at": self.prefill.needed_at,
        }
        return orjson.dumps(told).decode()

    def admits(self, record: ReplicaRecord) -> bool:
        """Whether the replica is ready and this request may go there."""
        return (
            record.state == "ready"
            and record.replica not in self.tried
            and (self.serving is None or record.replica in self.serving)
            and self.pinned in ("", record.replica)
        )

    def budget(self, uncached_tokens: int, requests: int = 0) -> Budget | None:
        """What it takes of its limits; None if there are none. `requests`: 1 if it is let in here."""
        limits = self.limits
        if limits is None:
            return None
        requests = 0 if self.is_counted else requests
        return Budget(limits.accounts, uncached_tokens + limits.output_tokens, requests)

    @property
    def _is_admitted(self) -> bool:
        """Whether its limits have let it in before. They let in a second attempt for itself."""
        return self.waited_s > 0 or (self.is_counted and self.hedge is None)

    def _line(self) -> str:
        if self.hedge is not None:
            return "hedge {:g} {}".format(*self.hedge)
        return self.standing.line(self.waited_s) if self.room_share or self.limits else ""

    def operands(
        self, script: Script, keys: PoolKeys, gateway: str, epoch: int, *, explain: bool, deadline_ms: int = 0
    ) -> tuple[Any, ...]:
        """Of `place`."""
        assert self.serving is not None
        return script.operands(
            keys,
            pair=self._pair(keys),
            gateway=gateway,
            epoch=epoch,
            reservation=self.reservation,
            explain=explain,
            deadline_ms=deadline_ms,
            seed=self.seed,
            digest=self.serving.digest,
            tried=" ".join(self.tried),
            release=self.release,
            pinned=self.pinned,
            order=" ".join(self.order),
            prompt_tokens=self.prompt_tokens,
            tip=self.tip,
            chain=" ".join(self.keys),
            answered=self.answer[0],
            answer_end=self.answer[1],
            shape=self.shape,
            may_report=self.may_report,
            room_share=self.room_share,
            line=self._line(),
            limits=self.limits.text(self._is_admitted, self.is_counted) if self.limits else "",
            bill=self.bill.text if self.bill else "",
            covered=self.covered_ms > 0,
            keys=self.keys,
            tokens=self.tokens,
        )


class Placement(NamedTuple):
    """Where a request goes. `why` is hit, partial_hit, rebalanced, stored, cold, pinned or last_resort.

    `matched_tokens` is exact if the matched record is resident, else an estimate. `claimed_from` is the 1-based
    index of the first key claimed (0: none); `touch` says that the last use of the
    matched keys is due to be written; `last_use_ms` is the matched key's (Redis time, 0 without a match).
    """

    replica: str
    incarnation: str
    url: str
    why: str
    matched_keys: int
    matched_tokens: int
    claimed_from: int
    touch: bool
    last_use_ms: int
    backlog_tokens: int
    matched_kind: str
    """Of the matched record: `resident`, `claim`, or empty without a match."""
    matched_entry: str
    """The entry of the replica's event stream that made it resident; empty for a claim."""
    placed_ms: int
    """Redis time."""
    mode: str
    """What the events that the replica's agent hears confirm: `session`, `partial`, `unconfirmed`; empty without an
    agent."""
    report: bool
    """Whether to ask the engine to report the blocks that it reuses for this request: its agent is relearning."""
    stored_keys: int = 0
    stored_tokens: int = 0
    """The tokens at the start of the prompt that LMCache has in Redis and the replica can load; 0 if it holds as
    many."""
    passed_over_tokens: int = 0
    """Tokens of the prompt that another candidate holds and the replica neither holds nor can load."""
    left: tuple[Left, ...] = ()
    """What is left of each of its accounts; empty if it has none."""
    costs: Sequence[Sequence[Any]] = ()
    """What the candidates cost: their names, their requests, and so on, see lua/steps/costs.lua. Empty unless the knobs
    ask for it."""
    spent: tuple[Spent, ...] = ()
    """What others have spent of each of its budgets, and hold; empty if it has none, or slices of its gateway cover
    it."""
    ahead_tokens: int = 0
    """The prompt tokens that its replica had to compute before."""
    prefill: Placement | None = None
    """Where the prompt is computed for this replica; None if it computes that itself."""
    unpaired: str = ""
    """Why it does, although others might have: `short` (too little is missing), `itself` (it computes all its prompts),
    `no_room` (the others have no room, or need too much time), `none` (none of them can be asked), `last_resort` or
    `pinned`."""

    @property
    def is_told(self) -> bool:
        """Whether an agent tells what this replica holds. What is not told is not there."""
        return self.mode in TOLD

    @property
    def is_exact(self) -> bool:
        """Whether events also confirm that what is told is there."""
        return self.mode == SESSION


@dataclass(slots=True)
class Reservation:
    """The leased load of one request attempt."""

    id: str
    replica: str
    incarnation: str
    backlog_tokens: int
    tip: str
    budget: Budget | None = None
    """None if it has no limits."""
    is_streamed: bool = True
    """Whether its first token will be seen; if not, prefills.py says when its backlog ends."""
    prefilled_by_s: float | None = None
    """Predicted, on the monotonic clock; infinite while unknown, None before the first heartbeat."""
    bill: Bill | None = None
    """None if it has no budgets."""
    placed_ms: int = 0
    """Redis time; 0: it was placed without the store, which had not told its time."""
    uncached_tokens: int = 0
    """When it was placed."""
    covered_ms: int = 0
    """Since when slices of its budgets hold what it can cost; 0: the store holds it for the request alone."""

    @property
    def is_held_alone(self) -> bool:
        """Whether the store holds something of budgets for it, outside of slices."""
        return self.bill is not None and not self.covered_ms


_REFUSALS = frozenset({b"full", b"full_tenant", b"unreachable", b"no_replica", b"no_room", b"later", b"withheld"})


Answer = Placement | Seat | Refused
"""What the store says of a request: where it goes, that it waits, or that it is refused."""


def parse_placement(reply: Any, bill: Bill | None = None) -> Answer | str:
    """The answer of `place` to a request with this bill; a status is `stale`, `undeclared`, `none`, `late` or
    `lost`."""
    if reply[0] == b"wait":
        return Seat(reply[1], reply[2], str(reply[3], "utf-8", "replace"))
    if reply[0] in _REFUSALS:
        return NoRoom(reply[0].decode(), reply[2] / 1000)
    if reply[0] == b"over_limit":
        return OverLimit(reply[3].decode(), reply[2] / 1000, _left(reply[4]), reply[5] - 1)
    if reply[0] == b"over_budget" and bill is not None:
        return OverBudget(bill.beside(_spent(reply[2]), reply[3]))
    if reply[0] != b"ok":
        return str(reply[0], "ascii")
    # Unpacked, and given by position: a third of the time that 21 names take.
    _, replica, incarnation, url, why, matched_keys, matched_tokens, claimed_from, touch, last_use_ms, *rest = reply
    backlog_tokens, kind, entry, placed_ms, mode, report, stored_keys, stored_tokens, passed_over, left, *costs = rest
    return Placement(
        _text(replica), _text(incarnation), _text(url), why.decode(), matched_keys, matched_tokens,
        claimed_from, touch == 1, last_use_ms, backlog_tokens, kind.decode(), _text(entry), placed_ms, _text(mode),
        report == 1, stored_keys, stored_tokens, passed_over, _left(left) if left else (),
        costs[0] if costs and isinstance(costs[0], list) else (),  # a text if an older version has granted it
        _spent(costs[1]) if len(costs) > 1 and costs[1] else (),
        int(costs[2]) if len(costs) > 2 else 0,
        *(_second(costs[3]) if len(costs) > 3 else ()),
    )  # fmt: skip


def _second(told: Any) -> tuple[Placement | None, str]:
    """The second place of a pair, or why there is none."""
    if isinstance(told, bytes):
        return None, _text(told)
    placement = parse_placement(told)
    return placement if isinstance(placement, Placement) else None, ""


def _text(told: bytes) -> str:
    """A script can only choose among what is there, and somebody may have written that by hand."""
    return told.decode("utf-8", "replace")


def _spent(text: bytes) -> tuple[Spent, ...]:
    life, *each = text.decode("ascii", "replace").split(" / ")
    return tuple(Spent(life, *map(int, numbers.split())) for numbers in each)


def _left(text: bytes) -> tuple[Left, ...]:
    return tuple(Left(*map(int, each.split())) for each in text.split(b" / "))
