"""The records of a pool's replicas and agents, and the state of a pool that a heartbeat returns. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

_Record = TypeVar("_Record")
_DIGITS = 15
"""How many digits a number may have; see lua/lib/safe.lua."""
GOOD_MS = 10**_DIGITS - 1
"""Stands for the end of a lease that is good and whose end is not known."""
_AGENT_FIELDS = 5


ASLEEP = "asleep"
"""The state of a replica whose engine was put to sleep, or is paused."""
SESSION, PARTIAL, UNCONFIRMED = "session", "partial", "unconfirmed"
"""Modes of agents that hear events. `session`: events tell what is held, and what is gone. `partial`: the engine has
other groups of blocks than those of full attention. Events tell what is gone; what they call held may lack blocks of
another group. `unconfirmed`: events tell nothing of prefixes, because no group holds whole ones or because they name no
sessions. An unknown mode, as agents of other versions may have, counts as `unconfirmed`."""
TOLD = frozenset({SESSION, PARTIAL})
"""The modes whose events tell what the replica does not hold."""
SERVING = frozenset({"ready", "draining"})
"""The states of replicas that work on the requests that they have."""


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
    """Residency that was said before this entry of the replica's event stream is void."""

    @classmethod
    def parse(cls, replica: str, text: str) -> ReplicaRecord:
        """Raises ValueError if it cannot be read."""
        incarnation, state, capacity, since, floor, url = text.split(" ", 5)
        return cls(replica, incarnation, state, int(capacity), int(since), url, int(floor))

    @property
    def is_serving(self) -> bool:
        """Whether it works on the requests that it has. One that is drained gets no new ones."""
        return self.state in SERVING

    @property
    def text(self) -> str:
        """The record as it is in the store."""
        numbers = f"{self.capacity_tokens} {self.since_ms} {self.floor}"
        return f"{self.incarnation} {self.state} {numbers} {self.url}"

    def register_arguments(self, only_if_absent: bool) -> dict[str, Any]:
        """Of the script; Redis says since when the record stands."""
        return {
            "replica": self.replica,
            "incarnation": self.incarnation,
            "state": self.state,
            "capacity_tokens": self.capacity_tokens,
            "url": self.url,
            "only_if_absent": only_if_absent,
        }


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One line of `agents`: see lua/attend.lua."""

    agent: str
    incarnation: str
    lease_until_ms: int
    mode: str
    is_relearning: bool
    waiting: int = 0
    """The length of the engine's queue; heartbeats do not tell it."""
    seq: int = -1
    """The last engine batch that the agent has worked in; heartbeats do not tell it."""

    @classmethod
    def parse(cls, text: str) -> AgentRecord:
        """Raises ValueError if it cannot be read."""
        agent, incarnation, until_ms, mode, relearning, waiting, seq = text.split(" ")[:7]
        return cls(agent, incarnation, int(until_ms), mode, relearning == "1", int(waiting), int(seq))


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """The figures of a pool's replicas that change all the time."""

    active: dict[str, int]
    """Requests in flight, by replica."""
    engines: dict[str, dict[str, float]]
    """The engines' own counters, under vLLM's names, as their agents read them last."""

    @classmethod
    def parse(cls, active: Sequence[bytes], engines: Sequence[bytes]) -> ReplicaFigures:
        """The two hashes, as flat replies. What cannot be read is left out."""
        return cls(each(active, _count), each(engines, _figures))


@dataclass(frozen=True, slots=True)
class PoolState:
    """What heartbeats have told of a pool."""

    known: bool
    """Whether the store knows this gateway under its epoch; if not, the gateway must reassert."""
    expired_gateways: tuple[str, ...]
    replicas: dict[str, ReplicaRecord]
    """A replica whose record cannot be read is as it was before: it is written again (see repair.py)."""
    open_until_ms: dict[str, int]
    """The breakers' open_until_ms, by replica; 0 for one that counts failures and is still closed."""
    worker: str
    """The gateway that holds the lease on the pool's maintenance."""
    now_ms: int
    agents: dict[str, AgentRecord]
    jumped: tuple[int, int] = (0, 0)
    """When the clock last jumped ahead (Redis time), and by how many ms within an hour: it was set, or no gateway had
    beaten. Zeros: never."""
    reaped: int = 0
    """How many reservations of dead gateways still have claims to handle."""
    version: str = ""
    """Of the replicas, their breakers, agents and streams; the next heartbeat is told what has changed since."""
    gateways: int = 1
    """How many gateways the store knows, this one included. One that has died counts until it is reaped."""
    has_waiting: bool = False
    """Whether requests wait for room."""

    def uncounted_ms(self, since_ms: int) -> int:
        """How much of the time since then may not have passed, or passed while the store did not serve."""
        at_ms, by_ms = self.jumped
        return by_ms if since_ms <= at_ms <= self.now_ms else 0  # if later, the clock went back since

    def has_open_breaker(self, replica: str) -> bool:
        """Whether requests to it failed so often lately that it gets a test request at most."""
        return self.open_until_ms.get(replica, 0) > self.now_ms

    def is_exact(self, replica: str) -> bool:
        """Whether events confirm what the map says of the replica: what it holds, and what it does not hold."""
        return self.is_told(replica) and self.agents[replica].mode == SESSION

    def is_told(self, replica: str) -> bool:
        """Whether a live agent tells what the replica's current incarnation holds. What is not told is not there."""
        return self.followed_until_ms(replica) >= self.now_ms

    def has_agent(self, replica: str) -> bool:
        """Whether an agent has the lease on the replica, whatever it hears of its engine."""
        agent = self.agents.get(replica)
        return agent is not None and agent.lease_until_ms >= self.now_ms

    def followed_until_ms(self, replica: str) -> int:
        """Until when an agent has the lease to tell what the replica's current incarnation holds; -1 if none ever
        did."""
        agent, record = self.agents.get(replica), self.replicas.get(replica)
        if agent is None or record is None or agent.incarnation != record.incarnation:
            return -1
        if agent.mode not in TOLD:
            return -1
        return agent.lease_until_ms


def is_number(text: bytes | str) -> bool:
    """Whether it is a number as scripts see it."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def time_ms(reply: Sequence[bytes]) -> int:
    """Redis' answer to TIME, in ms."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def readable(text: bytes) -> str:
    """Text from the store, which may hold any bytes."""
    return text.decode("utf-8", "replace")


def pairs(flat: Sequence[bytes]) -> dict[str, str]:
    """The fields and values of a flat reply."""
    return {readable(flat[i]): readable(flat[i + 1]) for i in range(0, len(flat), 2)}


def each(flat: Sequence[bytes], parse: Callable[[str, str], _Record]) -> dict[str, _Record]:
    """The records of a flat reply. One that cannot be read is left out; it hides no other (repair.py reports it)."""
    found = {}
    for name, text in pairs(flat).items():
        try:
            found[name] = parse(name, text)
        except (ValueError, TypeError, IndexError, AttributeError, OverflowError):
            continue
    return found


def _count(_: str, text: str) -> int:
    count = int(text)
    if not 0 <= count < 10**_DIGITS:
        raise ValueError("no count")
    return count


def moment_of(leases: dict[str, str], name: str) -> tuple[int, int]:
    """When the clock last `jumped` or `went_back` (Redis time), and by how many ms; zeros if it never did."""
    return _moment(leases.get(name, ""))


def _moment(text: str) -> tuple[int, int]:
    at_ms, _, by_ms = text.partition(" ")
    return (int(at_ms), int(by_ms)) if is_number(at_ms) and is_number(by_ms) else (0, 0)


def _figures(_: str, text: str) -> dict[str, float]:
    return {str(name): float(value) for name, value in orjson.loads(text).items()}


def still_known(
    records: dict[str, ReplicaRecord], before: PoolState | None, now: PoolState
) -> dict[str, ReplicaRecord]:
    """A gateway's records after a heartbeat: the store's, and those that the store does not have yet. A record that the
    store had and has no more was forgotten, unless the store does not know the gateway: then it has lost its data."""
    forgotten = before.replicas.keys() - now.replicas.keys() if before is not None and now.known else set()
    if forgotten:
        records = {name: record for name, record in records.items() if name not in forgotten}
    return records | now.replicas


def parse_pool_state(reply: Any, before: PoolState | None = None) -> PoolState:
    """A heartbeat's answer, whatever is in the store; `before` is the state of the last one. A lease that is good ends
    at GOOD_MS: the answer does not say when it ends."""
    status, expired, worker, now_ms, jumped, reaped, version, is_all, lines, gateways, waiting = reply
    known = before if before is not None else _EMPTY
    told = known
    if is_all or lines:
        start = _EMPTY if is_all else known
        told = replace(
            start,
            replicas=dict(start.replicas),
            open_until_ms=dict(start.open_until_ms),
            agents=dict(start.agents),
        )
        for name, line in pairs(lines).items():
            _take_line(told, name, line, known.replicas.get(name))
    return replace(
        told,
        known=status == b"ok",
        expired_gateways=tuple(readable(name) for name in expired),
        worker=readable(worker),
        now_ms=now_ms,
        jumped=_moment(readable(jumped)),
        reaped=reaped,
        version=readable(version),
        gateways=max(1, gateways),
        has_waiting=waiting == 1,
    )


def _take_line(state: PoolState, name: str, line: str, known: ReplicaRecord | None) -> None:
    """Put a line of `view` (see lua/lib/view.lua) in the place of what was told of this replica; an empty line says
    that it is gone. A record that cannot be read is as it was before."""
    for records in (state.replicas, state.open_until_ms, state.agents):
        records.pop(name, None)
    facts, has_record, text = line.partition("\n")
    if not has_record:
        return
    try:
        state.replicas[name] = ReplicaRecord.parse(name, text)
    except ValueError:
        if known is not None:
            state.replicas[name] = known
    open_until_ms, *others = facts.split(" ")
    if is_number(open_until_ms):
        state.open_until_ms[name] = int(open_until_ms)
    if len(others) == 1 + _AGENT_FIELDS and (others[3] == "+" or is_number(others[3])):
        _, who, incarnation, until_ms, mode, relearning = others
        lease_until_ms = GOOD_MS if until_ms == "+" else int(until_ms)
        state.agents[name] = AgentRecord(who, incarnation, lease_until_ms, mode, relearning == "1")


def surveyed_state(
    now_ms: int, replicas: Sequence[bytes], breakers: Sequence[bytes], agents: Sequence[bytes], leases: Sequence[bytes]
) -> PoolState:
    """A pool's state at one moment, from its hashes as flat replies, without a heartbeat."""
    return replace(
        _EMPTY,
        replicas=each(replicas, ReplicaRecord.parse),
        open_until_ms=each(breakers, lambda _, text: int(text.split(" ")[1])),
        now_ms=now_ms,
        agents=each(agents, lambda _, text: AgentRecord.parse(text)),
        jumped=moment_of(pairs(leases), "jumped"),
    )


_EMPTY = PoolState(True, (), {}, {}, "", 0, {})
