"""One request as its client saw it, and the verdict on it. No I/O.

A fault excuses only failures that nobody could have prevented:

- An answer that is no stream, of which the client had a byte, and that broke with its replica.
- A request whose gateway, or the link to it, was struck during the request: its client's connection broke.
- An answer that is late because its gateway was struck during the request, or because its replica was struck while it
  already answered the request: only these two can continue it. A stream that the client had a byte of goes on
  elsewhere.

Every fault leaves one gateway and two replicas unharmed, and streams go on elsewhere. So all other failed requests
could have been saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

PREFILL_S = 0.5
"""After this time at a replica, a request is being answered: a prompt of this load takes less time to compute."""


class End(Enum):
    """How a request ended."""

    COMPLETE = "complete"
    STATUS = "another status than 200"
    ERROR_EVENT = "a stream ended by an error event"
    BROKEN = "the connection broke"
    REFUSED = "every gateway refused the connection"
    UNANSWERED = "no end within the time that a client waits"


class Verdict(Enum):
    ANSWERED = "answered"
    LATE = "late"
    LATE_EXCUSED = "late, with its gateway or replica"
    LOST = "lost with its gateway or replica"
    SAVABLE = "could have been saved"

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.LOST, Verdict.SAVABLE)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. Times are seconds of one clock."""

    sent_s: float
    end: End
    ended_s: float
    streams: bool = False
    gateway: int | None = None
    """The gateway that took the connection."""
    replica: str = ""
    """The replica that the answer's head names."""
    state: str = ""
    """The state of the decision: `exact`, `degraded` or `fallback`."""
    head_s: float | None = None
    """When the first byte of the answer came."""
    late_s: float = 0.0
    """The delay of a stream's latest token, the first or a later one, or of a whole answer."""
    waited_s: float = 0.0
    """How long it waited in KVGate's queue before its last attempt, as the answer's head says."""
    detail: str = ""
    """Status and code, or how the connection broke."""
    went_on: bool = False
    """Whether its stream broke off, and went on at another replica, as the stream says at its end."""


@dataclass(frozen=True, slots=True)
class Strike:
    """The time during which a fault holds these gateways (by number) and replicas. A fault that lets them finish their
    requests is no strike."""

    at_s: float
    until_s: float
    gateways: frozenset[int] = frozenset()
    replicas: frozenset[str] = frozenset()


def verdict(seen: Seen, strikes: Iterable[Strike], late_after_s: float) -> Verdict:
    """The verdict on a request."""
    during = [strike for strike in strikes if strike.at_s <= seen.ended_s and strike.until_s >= seen.sent_s]
    if seen.end is End.COMPLETE:
        if seen.late_s <= late_after_s:
            return Verdict.ANSWERED
        return Verdict.LATE_EXCUSED if any(_excuses_lateness(strike, seen) for strike in during) else Verdict.LATE
    return Verdict.LOST if any(_loses(strike, seen) for strike in during) else Verdict.SAVABLE


def _excuses_lateness(strike: Strike, seen: Seen) -> bool:
    """The struck replica may not be the one that answered in the end, because a request can move."""
    had_begun = seen.sent_s + PREFILL_S <= strike.at_s or _had_a_byte(seen, strike)
    can_go_on = seen.streams and _had_a_byte(seen, strike)
    return seen.gateway in strike.gateways or (bool(strike.replicas) and had_begun and not can_go_on)


def _loses(strike: Strike, seen: Seen) -> bool:
    if seen.gateway in strike.gateways:
        return seen.end in (End.BROKEN, End.UNANSWERED)
    return not seen.streams and _had_a_byte(seen, strike) and seen.replica in strike.replicas


def _had_a_byte(seen: Seen, strike: Strike) -> bool:
    return seen.head_s is not None and seen.head_s <= strike.at_s
