"""The only place where a Redis key is spelled. The data model is described in README.md beside this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

PREFIX = "kvgate"
WATCHER = f"{PREFIX}:watcher"
"""In no namespace: a Redis is watched once, however many clusters share it."""
_SAFE = re.compile(r"[a-z0-9._-]{1,64}")
_UNSAFE = re.compile(r"[^a-z0-9._-]+")


def is_pool(name: str) -> bool:
    """Whether it is a name that `pool_slug` can make."""
    return _SAFE.fullmatch(name) is not None


def pool_slug(base_model: str) -> str:
    """The pool's name inside keys: `[a-z0-9._-]{1,64}`, with 8 hex digits of the name's digest if it had to be
    changed."""
    if _SAFE.fullmatch(base_model):
        return base_model
    digest = blake2b(base_model.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    readable = _UNSAFE.sub("-", base_model.lower()).strip("-")[-55:].lstrip("-") or "model"
    return f"{readable}-{digest}"


def prefix(namespace: str) -> str:
    """The beginning of all keys of a cluster, with its namespace if it has one."""
    return f"{PREFIX}:{namespace}" if namespace else PREFIX


def pools_key(namespace: str = "") -> str:
    """The set of a cluster's pools."""
    return f"{prefix(namespace)}:pools"


def models_key(namespace: str = "") -> str:
    """The hash of the models that a cluster has served."""
    return f"{prefix(namespace)}:models"


def shares_key(namespace: str = "") -> str:
    """The hash that counts how the requests of models are shared among their backends."""
    return f"{prefix(namespace)}:shares"


def stays_key(namespace: str, conversation: str, turn: int) -> str:
    """The hash that names the backends at which conversations stay, this one and others, in one turn of the clock. They
    are many hashes, so that Redis can drop each at once."""
    return f"{prefix(namespace)}:stays:{turn}:{conversation[:2]}"


def decisions_key(namespace: str = "") -> str:
    """The stream of the records of requests, while somebody watches."""
    return f"{prefix(namespace)}:decisions"


def decision_ring_key(namespace: str = "") -> str:
    """The hash that tells which slot of the ring of decisions gets records, and how many bytes each has. Its hash tag
    stands behind its name, as in `records_key`: the Redis user of agents must not reach it."""
    return f"{prefix(namespace)}:decided{{decisions}}"


def decision_slot_key(namespace: str, slot: int) -> str:
    """A hash of the ring of decisions."""
    return f"{decision_ring_key(namespace)}:{slot}"


def console_secret_key(namespace: str = "") -> str:
    """The string with which gateways sign sessions of the console."""
    return f"{prefix(namespace)}:console_secret"


def records_key(namespace: str = "") -> str:
    """The hash of what operators keep in the store: API keys and replicas. It shares its hash tag with `audit_key`. The
    tag stands behind the name, so no pattern of pools' keys fits these two. The Redis user of agents must not reach
    them."""
    return f"{prefix(namespace)}:records{{records}}"


def audit_key(namespace: str = "") -> str:
    """The stream of who has changed which record."""
    return f"{prefix(namespace)}:audit{{records}}"


def usage_key(namespace: str = "") -> str:
    """The base of the keys of the ledger of usage: `<base>:<hour>`, `<base>:hours` and `<base>:writers`. Its hash tag
    stands behind its name, as that of `records_key`."""
    return f"{prefix(namespace)}:usage{{usage}}"


def _key(name: str) -> cached_property[str]:
    """A key that a pool has once."""
    return cached_property(lambda keys: f"{keys.base}:{name}")


def _keys(kind: str) -> cached_property[Callable[[str], str]]:
    """Spells the keys of one kind, such as `own:<key>`, in the fastest way there is: whole chains are spelled on the
    request path."""
    return cached_property(lambda keys: f"{keys.base}:{kind}:".__add__)


@dataclass(frozen=True)  # without slots: cached_property keeps its values in __dict__
class PoolKeys:
    """The keys of one pool. All carry its hash tag, so that every script stays in one cluster slot."""

    pool: str
    namespace: str = ""
    """Keeps clusters on one Redis apart; empty if there is only one."""
    is_in_cluster: bool = False
    """Whether a script can only use keys of one slot, because the Redis is a Redis Cluster."""

    @cached_property
    def base(self) -> str:
        return f"{prefix(self.namespace)}:{{{self.pool}}}"

    @cached_property
    def anchor(self) -> str:
        """Never written: it tells the slot of all keys of the pool."""
        return f"{self.base}:-"

    history = _key("history")
    first_tokens = _key("first_tokens")
    replicas = _key("replicas")
    breakers = _key("breakers")
    active = _key("active")
    backlog_tokens = _key("backlog_tokens")
    owned_tokens = _key("owned_tokens")
    turn = _key("turn")
    gateways = _key("gateways")
    lost_gateways = _key("lost_gateways")
    reaped = _key("reaped")
    leases = _key("leases")
    agents = _key("agents")
    engines = _key("engines")
    progress = _key("progress")
    asks = _key("asks")
    reports = _key("reports")
    entries = _key("entries")
    restating = _key("restating")
    cursors = _key("cursors")
    unreadable = _key("unreadable")
    tiers = _key("tiers")
    subsets = _key("subsets")
    subsets_of = _key("subsets_of")
    subset_active = _key("subset_active")
    forgotten = _key("forgotten")
    draining = _key("draining")
    view = _key("view")
    view_changes = _key("view_changes")
    waiting = _key("waiting")
    waiting_tokens = _key("waiting_tokens")
    holds = _key("holds")
    rates = _key("rates")
    speeds = _key("speeds")
    fair = _key("fair")
    paces = _key("paces")
    patient = _key("patient")
    resumptions = _key("resumptions")
    hedges = _key("hedges")
    late = _key("late")
    bound = _key("bound")
    """The base of `bound:0` and `bound:1`: see pool/placed_chains.py."""

    own = _keys("own")
    subset = _keys("subset")
    seats = _keys("seats")
    turns = _keys("turns")
    charges = _keys("charges")
    budgets = _keys("budgets")
    grants = _keys("grants")
    heard = _keys("heard")
    leased = _keys("leased")
    spent = _keys("spent")
    chunk = _keys("chunk")
    events = _keys("events")
    measured = _keys("measured")
    flight = _keys("flight")
    held = _keys("held")
    response = _keys("response")

    @cached_property
    def tenants(self) -> str:
        """Of all pools, where one script can use their keys."""
        return f"{self.base if self.is_in_cluster else prefix(self.namespace)}:tenants"

    @cached_property
    def spending(self) -> str:
        """Of all pools, as `tenants`."""
        return f"{self.base if self.is_in_cluster else prefix(self.namespace)}:spending"

    def line(self, line: str, tenant: str) -> str:
        return f"{self.base}:line:{line} {tenant}"

    def bound_slot(self, slot: int) -> str:
        return f"{self.bound}:{slot}"
