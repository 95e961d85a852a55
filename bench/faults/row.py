"""The result of one fault, compared with the goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

LEAST_WAITING = 5
"""Requests that have to wait when the fault strikes."""


class Section(NamedTuple):
    """Rows that were measured on clusters of the same size and under the same load."""

    gateways: int
    replicas: int = 3
    waits: bool = False
    """Whether replicas have a cap, and requests wait."""


@dataclass(frozen=True)
class Row:
    """One fault. If it could not be measured, `skipped` says why and the other figures mean nothing."""

    fault: str
    gateways: int
    code: str
    """The digest of the code that was measured."""
    commit: str
    replicas: int = 3
    skipped: str = ""
    requests: int = 0
    failed: int = 0
    savable: int = 0
    """Failed requests that could have been saved."""
    late: int = 0
    late_excused: int = 0
    """Late answers whose gateway or replica was struck while it handled the request. They are not part of `late`."""
    latest_s: float = 0.0
    """The delay of the latest answer that is not excused."""
    right_after_s: float | None = None
    """Seconds until decisions were exact again. None if they were not while the run was watched."""
    goal_s: float | None = None
    counts_from_strike: bool = False
    load_left: str = ""
    predicted: int = 0
    wrong: tuple[str, ...] = ()
    """Wrong predictions in words."""
    kinds: dict[str, int] = field(default_factory=dict)
    """How requests failed, by kind."""
    last_wrong: str = ""
    """The last problem that was seen."""
    states: dict[str, int] = field(default_factory=dict)
    """Requests by the state of their decision."""
    streams_broken: int | None = None
    """Streams that a replica broke off. None: it was measured before these were counted."""
    streams_went_on: int = 0
    """Those of them that went on at another replica."""
    idle_share: float = 0.0
    """The idle share of the machine's processors."""
    wall_s: float = 0.0
    missed: tuple[str, ...] = ()
    waits: bool = False
    """Whether replicas had a cap. The fields below mean nothing without it."""
    waiting: int = 0
    """Seats when the fault struck."""
    waited: int = 0
    """Requests that waited, of those that the store placed or let wait (`placed`)."""
    placed: int = 0
    longest_wait_s: float = 0.0
    """Of answers that the fault does not excuse."""
    cap: int = 0
    most_active: int = 0
    """The most requests at a replica, as the store counted them."""
    most_running: int = 0
    """The same as an engine counted them."""
    over_cap_until_s: float | None = None
    """Seconds from the fault's end to the last moment at which a replica had more than its cap, and more than gateways
    had placed without the store. None if there was no such moment."""
    over_cap_goal_s: float | None = None
    """The most that this may be. None if there may be no such moment."""
    seats_left: str = ""
    """Keys of the queue that were left in Redis at the end, in words."""

    @property
    def section(self) -> Section:
        return Section(self.gateways, self.replicas, self.waits)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def judged(self) -> Row:
        """Adds the missed goals."""
        if self.skipped:
            return self
        missed = []
        if self.savable:
            missed.append(f"{self.savable} failed that could have been saved")
        if self.late:
            missed.append(f"{self.late} answers late, by {self.latest_s:.0f} s at worst")
        if self.goal_s is not None:
            if self.right_after_s is None:
                missed.append(f"not right again: {self.last_wrong}")
            elif self.right_after_s > self.goal_s:
                missed.append(f"right after {self.right_after_s:.1f} s, of {self.goal_s:g}: {self.last_wrong}")
        if self.load_left:
            missed.append(f"load: {self.load_left}")
        if self.wrong:
            missed.append(f"{len(self.wrong)} of {self.predicted} predictions wrong: {self.wrong[0]}")
        return replace(self, missed=(*missed, *self._missed_by_the_queue()))

    def _missed_by_the_queue(self) -> list[str]:
        if not self.waits:
            return []
        missed = []
        if self.waiting < LEAST_WAITING or 2 * self.waited < self.placed:
            missed.append(f"too few waited: {self.waiting} at the strike, {self.waited} of {self.placed} in all")
        if self.over_cap_until_s is not None and self.over_cap_until_s > (self.over_cap_goal_s or float("-inf")):
            last = f"the last {self.over_cap_until_s:.1f} s after the fault's end"
            missed.append(f"{self.most_active} requests at a replica that takes {self.cap}, {last}")
        if self.seats_left:
            missed.append(self.seats_left)
        return missed


def row_of(told: dict[str, Any]) -> Row:
    """The inverse of `as_dict`. Raises TypeError for other input."""
    return Row(**told | {name: tuple(told[name]) for name in ("wrong", "missed")})
