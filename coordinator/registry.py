"""The records of a pool's replicas and agents, and the view of them that a heartbeat brings back. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import structlog

_log = structlog.get_logger("kvgate.registry")
_Record = TypeVar("_Record")
_STREAM = "events:"
"""What the leases on event streams are called in `leases`."""


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One line of the registry: `<incarnation> <state> <capacity_tokens> <since_ms> <floor> <url>`."""

    replica: str
    incarnation: str
    state: str
    capacity_tokens: int
    since_ms: int
    url: str
    floor: int = 0
    """Residency said before this entry of the replica's event stream does not hold."""

    @classmethod
    def parse(cls, replica: str, text: str) -> ReplicaRecord:
        incarnation, state, capacity, since, floor, url = text.split(" ", 5)
        return cls(replica, incarnation, state, int(capacity), int(since), url, int(floor))

    def script_args(self, only_if_absent: bool) -> tuple[Any, ...]:
        """ARGV of register; since when it stands is Redis' to say."""
        return (self.replica, self.incarnation, self.state, self.capacity_tokens, self.url, int(only_if_absent))


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One line of `agents`: see lua/attend.lua."""

    agent: str
    incarnation: str
    lease_until_ms: int
    mode: str
    is_relearning: bool
    waiting: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> AgentRecord:
        agent, incarnation, until_ms, mode, relearning, waiting, seq = text.split(" ")
        return cls(agent, incarnation, int(until_ms), mode, relearning == "1", int(waiting), int(seq))


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a heartbeat brings back."""

    known: bool
    """Whether the store knows this gateway under its epoch; if not, it must reassert."""
    expired_gateways: tuple[str, ...]
    replicas: dict[str, ReplicaRecord]
    open_until_ms: dict[str, int]
    """Breakers that stand, by replica; 0 for one that counts failures and is still closed."""
    worker: str
    """The gateway that holds the lease on the pool's chores."""
    now_ms: int
    active: dict[str, int]
    agents: dict[str, AgentRecord]
    applied_until_ms: dict[str, int]
    """Until when somebody has the lease to apply a replica's event stream."""
    engines: dict[str, dict[str, float]]
    """The engines' own counters, under vLLM's names, as their agents read them last."""
    jumped: tuple[int, int] = (0, 0)
    """When the clock last jumped ahead (Redis time), and by how many ms in an hour: it was set, or nobody had beaten.
    Zeros: never."""
    reaped: int = 0
    """Reservations of dead gateways whose claims nobody has seen to yet."""

    def uncounted_ms(self, since_ms: int) -> int:
        """How much of the time since then may not have passed, or only while the store did not serve."""
        at_ms, by_ms = self.jumped
        return by_ms if since_ms <= at_ms <= self.now_ms else 0  # later: the clock went back since

    def is_exact(self, replica: str) -> bool:
        """Whether a live agent tells what the replica's current life holds, and somebody applies it."""
        return self.is_followed(replica) and self.applied_until_ms.get(replica, 0) >= self.now_ms

    def is_followed(self, replica: str) -> bool:
        """Whether a live agent tells what the replica's current life holds."""
        return self.followed_until_ms(replica) >= self.now_ms

    def followed_until_ms(self, replica: str) -> int:
        """Until when an agent has the lease to tell what the replica's current life holds; -1 where none ever told."""
        agent, record = self.agents.get(replica), self.replicas.get(replica)
        if agent is None or record is None or agent.mode == "none" or agent.incarnation != record.incarnation:
            return -1
        return agent.lease_until_ms


def pairs(flat: list[bytes]) -> dict[str, str]:
    """A reply's fields and values, which come flat."""
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _each(flat: list[bytes], parse: Callable[[str, str], _Record]) -> dict[str, _Record]:
    """Each record by itself: one that cannot be read must not hide the others."""
    found = {}
    for name, text in pairs(flat).items():
        try:
            found[name] = parse(name, text)
        except (ValueError, TypeError, IndexError):
            _log.warning("a record that cannot be read", name=name)
    return found


def _applied_until_ms(leases: list[bytes]) -> dict[str, int]:
    streams = {name: text for name, text in pairs(leases).items() if name.startswith(_STREAM)}
    return {name.removeprefix(_STREAM): int(text.rpartition(" ")[2]) for name, text in streams.items()}


def moment_of(leases: dict[str, str], name: str) -> tuple[int, int]:
    """When the clock last `jumped` or `went_back` (Redis time), and by how much, in ms; zeros where it never did."""
    at_ms, _, by_ms = leases.get(name, "").partition(" ")
    return (int(at_ms), int(by_ms)) if at_ms.isdigit() and by_ms.isdigit() else (0, 0)


def _figures(_: str, text: str) -> dict[str, float]:
    return {str(name): float(value) for name, value in orjson.loads(text).items()}


def still_known(records: dict[str, ReplicaRecord], before: Fleet | None, now: Fleet) -> dict[str, ReplicaRecord]:
    """A gateway's records after a heartbeat: the store's, and those it was not told of yet. What it had and has no more
    was forgotten; but a store that does not know the gateway has lost more than that."""
    forgotten = before.replicas.keys() - now.replicas.keys() if before is not None and now.known else set()
    return {name: record for name, record in records.items() if name not in forgotten} | now.replicas


def parse_fleet(reply: Any) -> Fleet:
    status, expired, replicas, breakers, worker, now_ms, active, agents, engines, leases, reaped = reply
    return Fleet(
        known=status == b"ok",
        expired_gateways=tuple(name.decode() for name in expired),
        replicas=_each(replicas, ReplicaRecord.parse),
        open_until_ms=_each(breakers, lambda _, text: int(text.split(" ")[1])),
        worker=worker.decode(),
        now_ms=now_ms,
        active={name: int(text) for name, text in pairs(active).items()},
        agents=_each(agents, lambda _, text: AgentRecord.parse(text)),
        applied_until_ms=_applied_until_ms(leases),
        engines=_each(engines, _figures),
        jumped=moment_of(pairs(leases), "jumped"),
        reaped=reaped,
    )
