"""The Lua scripts as typed values: how each is called, and what its answer means. No I/O.

A script file opens with a comment that declares its KEYS and ARGV (see signature.py) and says what it returns. In the
text that Redis gets, the blank line behind this comment defines the declared names as locals. So the line numbers in
Redis' error messages are those of the file, up to the first include. `-- include NAME` lines pull in lua/lib/NAME.lua,
each once, and `-- include FOLDER/NAME` pulls in lua/FOLDER/NAME.lua. A setting in angle brackets stands for its value:
`-- include policies/<policy>`. `-- include place(SETTINGS, KEYS, ARGV)` makes a Lua function of a whole script, which
reads its settings from a table. Functions that a script never calls are left out. On Redis >= 7 a
`#!lua flags=allow-oom` line is put in front, so that coordination continues when chunks have filled the memory; Redis
6.2 does not know that line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

from coordinator import breaker
from coordinator.keys import PoolKeys
from coordinator.registry import SESSION, TOLD, ReplicaRecord
from coordinator.signature import Flattener, Signature, flattener, lua_locals, read_signature
from coordinator.subset import Subset

SHEBANG = "#!lua flags=allow-oom\n"
NO_TIP = "-"
"""The tip of a request that has no chain."""
_LUA = files(__package__) / "lua"
NAMES = tuple(sorted(file.name.removesuffix(".lua") for file in _LUA.iterdir() if file.name.endswith(".lua")))
"""The names of all scripts. Each script is a file of lua/."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and its SHA1, the name Redis knows it by.

    `operands(keys, replica="r0", …)` makes what EVALSHA takes behind the digest: numkeys, KEYS and ARGV.
    """

    name: str
    text: str
    sha: str
    operands: Flattener


@cache
def _file(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text()


@cache
def signature(name: str) -> Signature:
    """The KEYS and ARGV that a script's header declares."""
    return read_signature(name, _file(name))


@cache
def local_line(name: str, knobs: PolicyKnobs | None = None) -> str:
    """The line of Lua that gives names to a script's settings, keys and arguments."""
    return lua_locals(signature(name), _settings(knobs))


def _settings(knobs: PolicyKnobs | None) -> dict[str, Any]:
    """The settings of `place`."""
    settings = asdict(knobs or PolicyKnobs())
    return {"policy": settings.pop("name"), "probe_ms": breaker.OPEN_MS, **settings}


@cache
def source(name: str, knobs: PolicyKnobs | None = None) -> str:
    """The text of a script with its locals and includes, without a shebang. `knobs` are the settings of `place`."""
    settings = _settings(knobs)
    header, _, body = _file(name).partition("\n\n")
    text = _without_unused(_with_includes(f"{header}\n{local_line(name, knobs)}\n{body}", settings, set()))
    return _AS_FUNCTION.sub(lambda include: as_function(include[1]), text)


_AS_FUNCTION = re.compile(r"^-- include (\w+)\(.*\)$", re.MULTILINE)
_FUNCTION = re.compile(r"(?:^--.*\n)*^local function (\w+)\(.*\n(?:.*\n)*?end\n\n?", re.MULTILINE)
_WORD, _COMMENT = re.compile(r"\w+"), re.compile(r"--.*")


def _without_unused(text: str) -> str:
    """Without the functions of the includes that the script never calls. Each run makes all functions anew, and Redis'
    Lua gets slower with all code that it keeps (see bench/place.py)."""
    functions = {found[1]: found for found in _FUNCTION.finditer(text)}
    named, unused = Counter(_words(text)), list[re.Match[str]]()
    while found := [functions.pop(name) for name in list(functions) if named[name] == 1]:
        unused += found
        for one in found:  # those that it calls may be unused, too
            named.subtract(_words(one[0]))
    for one in sorted(unused, key=lambda one: one.start(), reverse=True):
        text = text[: one.start()] + text[one.end() :]
    return text


def _words(text: str) -> list[str]:
    return _WORD.findall(_COMMENT.sub("", text))


def _with_includes(text: str, settings: dict[str, Any] | None, seen: set[str]) -> str:
    def included(match: re.Match[str]) -> str:
        file = match[1]
        if "<" in file and settings is None:
            return _each_of(file)
        file = re.sub(r"<(\w+)>", lambda setting: str((settings or {})[setting[1]]), file)
        if file in seen:
            return ""
        seen.add(file)
        text = (_LUA / f"{file if '/' in file else f'lib/{file}'}.lua").read_text()
        return _with_includes(text, settings, seen)

    return re.sub(r"^-- include ([^(\n]+)$", included, text, flags=re.MULTILINE)


@cache
def as_function(name: str) -> str:
    """A script as a function, without comments. It takes no seats itself: it is what a grant calls."""
    body = _file(name).partition("\n\n")[2]
    text = _without_unused(re.sub(r"^ *--.*\n", "", _with_includes(body, None, {"turns"}), flags=re.MULTILINE))
    return f"local function {name}(SETTINGS, KEYS, ARGV)\n{lua_locals(signature(name), None)}\n{text}\nend"


def _each_of(pattern: str) -> str:
    """The files that `<setting>` in an include can mean, of which the script runs one."""
    folder, _, setting = pattern.partition("/")
    branches = [
        f"{'else' if at else ''}if {setting.strip('<>')} == '{file.name.removesuffix('.lua')}' then\n{file.read_text()}"
        for at, file in enumerate(sorted((_LUA / folder).iterdir(), key=lambda file: file.name))
    ]
    return "\n".join([*branches, "end"])


@cache
def load(name: str, allow_oom: bool, knobs: PolicyKnobs | None = None) -> Script:
    """The script as it is sent to the server. `knobs` are the settings of `place`."""
    text = (SHEBANG if allow_oom else "") + source(name, knobs)
    sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, sha, flattener(signature(name)))


@dataclass(frozen=True, slots=True)
class PolicyKnobs:
    """How to choose: the policy's name, and when requests wait. The defaults are a gateway's: the script with these is
    loaded when it connects."""

    name: str = "prefix_kv_aware"
    max_active_requests: int = 0
    max_wait_s: float = 10.0
    prefill_tokens_per_s: float = 8000.0
    max_waiting: int = 1000
    max_waiting_per_tenant: int = 500
    tells_costs: int = 0


@lru_cache(maxsize=1024)
def _quoted(tenant: str) -> str:
    return quote(tenant, safe="")


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
        return _quoted(self.tenant)


class Seat(NamedTuple):
    """A request has to wait. `expected_ms` is how long it most likely waits; 0 if nothing tells. `room` is a replica
    that has room for one of those that come before it; "" if there is none."""

    since_ms: int
    expected_ms: int
    room: str = ""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have over all gateways; 0: any number. `output_tokens` is the most that the request's answer
    can take, and `most_tokens` what the engine can compute for it, its prompt included; 0: not known."""

    concurrency: int = 0
    requests_per_min: int = 0
    tokens_per_min: int = 0
    output_tokens: int = 0
    most_tokens: int = 0

    def text(self, has_waited: bool, is_counted: bool) -> str:
        """As `place` takes it. A request that has waited was let in before, and one that is counted pays no second
        time."""
        requests_per_min = 0 if is_counted else self.requests_per_min
        limits = f"{self.concurrency} {requests_per_min} {self.tokens_per_min} {self.output_tokens}"
        return f"{limits} {int(has_waited or is_counted)}"


class Budget(NamedTuple):
    """What requests take of their tenant's limits."""

    tenant: str
    """As in keys and records."""
    tokens: int
    tokens_per_min: int
    requests: float
    """Those that no script has counted yet."""
    requests_per_min: int

    @property
    def text(self) -> str:
        """As `reassert` and `adopt` take it."""
        return f"{self.tenant} {self.tokens} {self.tokens_per_min} {self.requests:.3f} {self.requests_per_min}"


class Used(NamedTuple):
    """The tokens that a request took."""

    charge_tokens: int
    """Of its tenant's share: uncached tokens, and those of the answer, weighted."""
    limit_tokens: int
    """Of its tenant's limit: uncached tokens, and those of the answer."""

    @property
    def text(self) -> str:
        """As `settle` takes it."""
        return f"{self.charge_tokens} {self.limit_tokens}"


NOTHING = Used(0, 0)


class Refusal(NamedTuple):
    """A request may not even wait. `reason` is full, full_tenant or unreachable."""

    reason: str
    expected_ms: int


class Exhausted(NamedTuple):
    """A tenant has used up a limit (`requests` or `tokens`): see OverLimit."""

    limit: str
    wait_ms: int
    left: tuple[int, ...]


@dataclass(slots=True)  # not frozen, which would make it four times as slow to make
class PlaceRequest:
    """What `place` decides on. `keys` (32 hex) and `tokens` (behind each key) run shallow to deep."""

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
    limits: TenantLimits | None = None
    """Those of its tenant; None if it has none."""
    waited_s: float = 0.0
    """How long it has waited for room."""
    is_counted: bool = False
    """Whether the store has counted it for its tenant's limits: an attempt before, in another pool, or a placement that
    came too late."""
    affinity: bytes = b""
    """The bytes that rendezvous hashing hashes while the store is away; the store does not get them."""
    answer: tuple[int, int] = (0, 0)
    """The last answer in the prompt: how many keys come before it, and how many up to its end; zeros if there is
    none."""

    @property
    def tip(self) -> str:
        return self.keys[-1] if self.keys else NO_TIP

    def admits(self, record: ReplicaRecord) -> bool:
        """Whether the replica is ready and this request may go there."""
        return (
            record.state == "ready"
            and record.replica not in self.tried
            and (self.serving is None or record.replica in self.serving)
            and self.pinned in ("", record.replica)
        )

    def budget(self, uncached_tokens: int, requests: int = 0) -> Budget | None:
        """What it takes of its tenant's limits; None if there are none. `requests`: 1 if it is let in here."""
        limits = self.limits
        if limits is None:
            return None
        requests = 0 if self.is_counted else requests
        tokens = uncached_tokens + limits.output_tokens
        return Budget(self.standing.tenant_text, tokens, limits.tokens_per_min, requests, limits.requests_per_min)

    def operands(
        self, script: Script, keys: PoolKeys, gateway: str, epoch: int, *, explain: bool, deadline_ms: int = 0
    ) -> tuple[Any, ...]:
        """Of `place`."""
        assert self.serving is not None
        return script.operands(
            keys,
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
            line=self.standing.line(self.waited_s) if self.room_share or self.limits else "",
            limits=self.limits.text(self.waited_s > 0, self.is_counted) if self.limits else "",
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
    left: tuple[int, ...] = ()
    """What is left of its tenant's limits: requests, ms until all are there again, tokens, ms; -1 where there is no
    limit. Then its requests in flight, if these are limited. Empty if there are no limits."""
    costs: bytes = b""
    """What the candidates cost, as JSON: see lua/place.lua. Empty unless the knobs ask for it."""

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
    """None if its tenant has no limits."""
    is_streamed: bool = True
    """Whether its first token will be seen; if not, prefills.py says when its backlog ends."""
    prefilled_by_s: float | None = None
    """Predicted, on the monotonic clock; infinite while unknown, None before the first heartbeat."""


_REFUSALS = frozenset({b"full", b"full_tenant", b"unreachable"})


def parse_placement(reply: Any) -> Placement | Seat | Refusal | Exhausted | str:
    """The answer of `place`; a status is `stale`, `undeclared`, `none`, `late` or `lost`."""
    if reply[0] == b"wait":
        return Seat(reply[1], reply[2], str(reply[3], "utf-8", "replace"))
    if reply[0] in _REFUSALS:
        return Refusal(reply[0].decode(), reply[2])
    if reply[0] == b"over_limit":
        return Exhausted(reply[3].decode(), reply[2], _numbers(reply[4]))
    if reply[0] != b"ok":
        return str(reply[0], "ascii")
    # Unpacked, and given by position: a third of the time that 21 names take.
    _, replica, incarnation, url, why, matched_keys, matched_tokens, claimed_from, touch, last_use_ms, *rest = reply
    backlog_tokens, kind, entry, placed_ms, mode, report, stored_keys, stored_tokens, passed_over, left, *costs = rest
    return Placement(
        _text(replica), _text(incarnation), _text(url), why.decode(), matched_keys, matched_tokens,
        claimed_from, touch == 1, last_use_ms, backlog_tokens, kind.decode(), _text(entry), placed_ms, _text(mode),
        report == 1, stored_keys, stored_tokens, passed_over, _numbers(left) if left else (),
        costs[0] if costs else b"",  # none if an older version has granted it
    )  # fmt: skip


def _text(told: bytes) -> str:
    """A script can only choose among what is there, and somebody may have written that by hand."""
    return told.decode("utf-8", "replace")


def _numbers(text: bytes) -> tuple[int, ...]:
    return tuple(map(int, text.split()))
