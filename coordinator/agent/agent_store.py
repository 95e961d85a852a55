"""An agent's connection to the shared state in Redis: what it publishes of its replica, and what it reads.

Registration opens the connection, and refuses a replica id that belongs to another engine.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import structlog

from coordinator.agent.chains import Binding
from coordinator.agent.http_engine import EngineSnapshot
from coordinator.agent.residency import Evicted, Reset, Resident, Transition
from coordinator.errors import StoreDown, StoreError
from coordinator.keys import PoolKeys
from coordinator.known_pools import list_pool
from coordinator.pool.draining import drain
from coordinator.pool.placed_chains import read_chains
from coordinator.redis.address import connect
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire, load_scripts
from coordinator.registry import AgentRecord, ReplicaRecord, is_number, readable

_log = structlog.get_logger("kvgate.agent")

LEASE_MS = 3000
STREAM_CAP = 1000
"""About this many entries of a replica's stream are kept, for those who want to read them."""
PIECE = 100
"""The most transitions in one entry: Redis takes half a ms for them, or a ms on a busy machine."""
_CONNECT_S = 1.0
_ANSWER_S = 2.0
_MAX_PROMPT_TOKENS = 2**32 - 1
_UNREADABLE = "the replica's record cannot be read"


class Fenced(Exception):
    """Another agent holds the replica, or the registry has another incarnation of it."""


class IdTaken(Fenced):
    """The registry has another, living engine under this replica's id."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A prompt's length as its engine counted it: see coordinator/pool/engine_feedback.py."""

    tip: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Attended:
    """The answer to a heartbeat."""

    before: AgentRecord | None
    """The agent that held the replica before this heartbeat, and the last engine batch that it applied."""
    asked: str
    measured: list[Measured]
    voided: list[str]
    """Keys that the engine was found not to serve."""
    had_lapsed: bool
    """Whether this agent's lease had run out: meanwhile, others may have treated its replica's keys as claims."""
    agents: int
    """How many agents the pool has."""
    state: str
    """The replica's state in the registry."""
    restating: int
    """How many agents of the pool say everything again."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a heartbeat tells: see lua/attend.lua."""

    mode: str
    is_relearning: bool
    waiting: int
    seq: int | None
    """None leaves the last agent's number, because its knowledge is not taken over yet."""
    counters: dict[str, float]
    is_restating: bool = False
    held_tokens: int = 0
    """In the blocks that the engine holds, as its events tell."""


class AgentStore:
    """One replica's agent in one pool, over one connection. Every method raises StoreError if the connection breaks."""

    def __init__(self, wire: Wire, keys: PoolKeys, replica: str, agent: str) -> None:
        self._wire = wire
        self.keys = keys
        self._replica = replica
        self._agent = agent
        self.incarnation = ""
        """The engine process that is followed; empty before `register`."""
        self.entries: int | None = None
        """Entries in the stream: as of the first heartbeat, plus those published since. None before the heartbeat."""

    @classmethod
    async def open(cls, url: str, pool: str, replica: str, agent: str, namespace: str = "") -> AgentStore:
        """Connect, load the scripts, and list the pool."""
        keys = PoolKeys(pool, namespace)
        wire = await connect(url, keys.anchor, _CONNECT_S, lambda _error: None)
        try:
            await answered(load_scripts(wire), _ANSWER_S)
            await _list(url, keys)
        except BaseException:
            await wire.close("gave up connecting")
            raise
        return cls(wire, keys, replica, agent)

    async def close(self) -> None:
        await self._wire.close()

    async def register(self, started: str, capacity_tokens: int, url: str) -> None:
        """Register the replica, or a later incarnation of it. An engine that does not tell when it started has the
        incarnation that the gateways have counted."""
        known = await self.record() if not started else None
        self.incarnation = started or (known.incarnation if known else "life-1")
        record = ReplicaRecord(self._replica, self.incarnation, "ready", capacity_tokens, 0, url)
        await self._run("register", **record.register_arguments(only_if_absent=True))

    async def record(self) -> ReplicaRecord | None:
        """The replica's record in the registry. Raises StoreDown if it cannot be read."""
        found = await self.ask("HGET", self.keys.replicas, self._replica)
        try:
            return ReplicaRecord.parse(self._replica, readable(found)) if found else None
        except ValueError:
            raise StoreDown(_UNREADABLE) from None

    async def is_followed_by_another(self, known: ReplicaRecord) -> bool:
        """Whether another agent has the lease on that incarnation of the replica now."""
        found = await self.ask("HGET", self.keys.agents, self._replica)
        seconds, _ = await self.ask("TIME")
        held = _agent_of(found or b"")
        if held is None or held.lease_until_ms < int(seconds) * 1000:
            return False
        return held.agent != self._agent and held.incarnation == known.incarnation

    async def attend(self, vitals: Vitals, leaving: bool = False) -> Attended | float:
        """One heartbeat. If another agent has the replica, returns the seconds until it may be free. Raises Fenced."""
        reply = await self._run(
            "attend",
            replica=self._replica,
            agent=self._agent,
            incarnation=self.incarnation,
            lease_ms=0 if leaving else LEASE_MS,
            mode=vitals.mode,
            relearning=int(vitals.is_relearning),
            waiting=vitals.waiting,
            seq="" if vitals.seq is None else vitals.seq,
            counters=orjson.dumps(vitals.counters) if vitals.counters else "",
            held_tokens=vitals.held_tokens,
            restates=vitals.is_restating,
        )
        if reply[0] == b"held":
            return float(reply[1]) / 1000
        if reply[0] == b"unregistered":
            raise Fenced("the registry knows the replica in another life")
        if reply[0] == b"unreadable":
            raise StoreDown(_UNREADABLE)
        self.entries = int(reply[4]) if self.entries is None else self.entries
        measured = [prompt for text in reply[3] if (prompt := _measured(text)) is not None]
        voided = [key for text in reply[3] for key in _voided(text)]
        before, asked, (lapsed, agents, state, restating) = _agent_of(reply[1]), readable(reply[2]), reply[5:]
        return Attended(before, asked, measured, voided, lapsed == 1, agents, readable(state), restating)

    async def change_state(self, before: str, after: str) -> None:
        """Change the replica's state in the registry, if it still has this incarnation and is in the state `before`."""
        await self._run("mark", replica=self._replica, incarnation=self.incarnation, before=before, after=after)
        await self._run("settle", gateway="", sums="", settled=[("room", self._replica, "")])

    async def bindings(self, sessions: Sequence[str], elsewhere_is_report: bool) -> list[Binding]:
        """The chains of these sessions. If a session was placed on another replica since, its record no longer tells
        whether this engine was asked to report; `elsewhere_is_report` stands in for that."""
        replies = await read_chains(self.ask, self.keys, sessions)
        pairs = ((session, text) for session, text in zip(sessions, replies, strict=True) if text)
        found = [read for session, text in pairs if (read := _binding(session, text)) is not None]
        here = (self._replica, self.incarnation)
        return [binding if at == here else replace(binding, is_report=elsewhere_is_report) for at, binding in found]

    async def publish(self, transitions: Sequence[Transition], age_s: float, seq: int | None) -> int:
        """Change the map, and append the transitions to the stream. Returns the number of the first entry. Raises
        Fenced.

        `seq` is the engine batch that is completely published with them; None if more has to follow first.
        """
        numbers = []
        for start in range(0, len(transitions), PIECE):
            lines = [_line(each) for each in transitions[start : start + PIECE]]
            is_last = start + PIECE >= len(transitions)
            numbers.append(await self._publish(lines, age_s, seq if is_last else None))
        return numbers[0] if numbers else 0

    async def void_before(self, entry: int, seq: int) -> None:
        """Publish that all is void that was said before that entry, and not since; if it is 0, that all is. Raises
        Fenced."""
        await self._publish([f"floor {entry}" if entry else "reset"], 0.0, seq)

    async def _publish(self, lines: Sequence[str], age_s: float, seq: int | None) -> int:
        """Needs a heartbeat first, which tells the length of the stream."""
        number = await self._run(
            "publish",
            replica=self._replica,
            agent=self._agent,
            incarnation=self.incarnation,
            cap=STREAM_CAP,
            age_ms=int(age_s * 1000),
            seq="" if seq is None else seq,
            last_entry=self.entries or 0,
            keys=[line.split(" ", 2)[1] for line in lines if line[0] in "+-"],
            transitions=lines,
        )
        if number == 0:
            raise Fenced("another agent holds the replica")
        if number < 0:
            raise StoreDown("the stream is not where this agent left it")
        self.entries = int(number)
        return int(number)

    async def drain(self) -> None:
        """From now on the replica gets no new requests."""
        await drain(self._run, self._replica)

    async def active_requests(self) -> int:
        """The replica's requests in flight."""
        found = await self.ask("HGET", self.keys.active, self._replica)
        return int(found) if found and is_number(found) else 0

    async def residents(self) -> list[Resident]:
        """The keys that the map has as resident in this replica's current incarnation."""
        record = await self.record()
        if record is None:
            return []
        keys = [readable(key) for key in await self.ask("ZRANGE", self.keys.held(self._replica), 0, -1)]
        found: list[Resident] = []
        for start in range(0, len(keys), PIECE):
            part = keys[start : start + PIECE]
            texts = await asyncio.gather(*(self.ask("HGET", self.keys.own(key), self._replica) for key in part))
            found += [
                resident
                for key, text in zip(part, texts, strict=True)
                if text and (resident := _resident(key, readable(text), record)) is not None
            ]
        return found

    async def _run(self, name: str, **arguments: Any) -> Any:
        return await answered(self._wire.ask_script(name, self.keys, **arguments), _ANSWER_S)

    async def ask(self, *command: Any) -> Any:
        """A plain command."""
        return await answered(self._wire.send(*command), _ANSWER_S)


class Registration:
    """Opens an agent's connections. It lives from one session with the engine to the next."""

    def __init__(self, redis_url: str, replica: str, agent: str, namespace: str = "") -> None:
        self._redis_url = redis_url
        self._namespace = namespace
        self._replica = replica
        self._agent = agent
        self._replaced = ""
        """The incarnation that this agent last replaced by its own engine's. If it comes back, it is another engine's:
        an earlier incarnation of the same engine comes back only with a store that is as it was before."""
        self._last: AgentStore | None = None
        self._seen_entries = 0

    async def open(self, snapshot: EngineSnapshot) -> AgentStore:
        """Connect, and register the replica, or a later incarnation of it. Raises StoreError and IdTaken."""
        store = await AgentStore.open(self._redis_url, snapshot.pool, self._replica, self._agent, self._namespace)
        try:
            known = await store.record()
            if known is not None and snapshot.started and known.incarnation != snapshot.started:
                is_back = known.incarnation == self._replaced and not await self._is_earlier(store)
                if is_back or await store.is_followed_by_another(known):
                    raise IdTaken(_words(known, snapshot))
                self._replaced = known.incarnation
            await store.register(snapshot.started, snapshot.capacity_tokens, snapshot.url)
        except (StoreError, IdTaken):
            await store.close()
            raise
        self._last = store
        return store

    async def _is_earlier(self, store: AgentStore) -> bool:
        """Whether the store has fewer of the replica's entries than this agent has seen: it lost its last writes, and
        came back as it was before them. (A Redis replica that lags became the master.)"""
        if self._last is not None:
            self._seen_entries = max(self._seen_entries, self._last.entries or 0)
        found = await store.ask("HGET", store.keys.entries, self._replica) or b"0"
        return is_number(found) and int(found) < self._seen_entries


def _words(known: ReplicaRecord, snapshot: EngineSnapshot) -> str:
    return (
        f"another engine lives under this id: the registry means the one at {known.url}, started {known.incarnation}; "
        f"here it is the one at {snapshot.url}, started {snapshot.started}. Give clusters that share a Redis a "
        "redis.namespace each, and replicas of one cluster an id each"
    )


async def _list(url: str, keys: PoolKeys) -> None:
    try:
        await list_pool(url, keys, _CONNECT_S)
    except StoreError as error:  # only the doctor needs the list
        _log.warning("cannot list the pool", pool=keys.pool, reason=str(error))


def _agent_of(record: bytes) -> AgentRecord | None:
    """None if there is no record, or no agent wrote it."""
    try:
        return AgentRecord.parse(readable(record))
    except ValueError:
        return None


def _line(transition: Transition) -> str:
    match transition:
        case Resident(key, tokens, span_tokens, medium, block_hash):
            return f"+ {key} {tokens} {span_tokens} {medium} {block_hash:016x}"
        case Evicted(key):
            return f"- {key}"
        case Reset():
            return "reset"


def _binding(tip: str, text: bytes) -> tuple[tuple[str, str], Binding] | None:
    """A chain, and the replica and incarnation that its last placement chose; None if no gateway wrote the record."""
    try:
        replica, incarnation, report, prompt_tokens, shape, *keys = text.decode().split(" ")
        behind = orjson.loads(shape)
        text_bytes = array("q", map(int, behind["text_bytes"]))
        image_counts = array("q", map(int, behind.get("image_counts") or [0] * len(keys)))
        expected_tokens = int(prompt_tokens)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    if not len(keys) == len(text_bytes) == len(image_counts) > 0:
        return None
    keys = [sys.intern(key) for key in keys]  # prompts share beginnings, and an agent knows thousands of chains
    binding = Binding(tip, keys, text_bytes, image_counts, expected_tokens, is_report=report == "1")
    return (replica, incarnation), binding


def _resident(key: str, text: str, record: ReplicaRecord) -> Resident | None:
    """None if the record is not of a resident key, or cannot be read."""
    try:
        incarnation, kind, medium, span, _, _, *rest = text.split(" ")
        if incarnation != record.incarnation or kind != "resident" or int(rest[0]) < record.floor:
            return None
        return Resident(key, int(rest[1]), int(span), medium, int(rest[2], 16))
    except (ValueError, IndexError):
        return None


def _measured(text: bytes) -> Measured | None:
    """None if no gateway wrote the record."""
    try:
        record = orjson.loads(text)
        measured = Measured(str(record["tip"]), int(record["prompt_tokens"]))
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    return measured if 0 < measured.prompt_tokens <= _MAX_PROMPT_TOKENS else None


def _voided(text: bytes) -> list[str]:
    """The keys that a gateway asks to forget; none if the record is about something else."""
    try:
        return [str(key) for key in orjson.loads(text).get("void") or ()]
    except (ValueError, TypeError, AttributeError):
        return []
