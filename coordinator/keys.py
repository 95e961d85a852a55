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


def decisions_key(namespace: str = "") -> str:
    """The stream of the records of requests, while somebody watches."""
    return f"{prefix(namespace)}:decisions"


def console_secret_key(namespace: str = "") -> str:
    """The string with which gateways sign sessions of the console."""
    return f"{prefix(namespace)}:console_secret"


@dataclass(frozen=True)  # without slots: cached_property keeps its values in __dict__
class PoolKeys:
    """The keys of one pool. All carry its hash tag, so that every script stays in one cluster slot."""

    pool: str
    namespace: str = ""
    """Keeps clusters on one Redis apart; empty if there is only one."""
    is_in_cluster: bool = False
    """Whether a script can only use keys of one slot, because the Redis is a Redis Cluster."""

    @cached_property
    def _base(self) -> str:
        return f"{prefix(self.namespace)}:{{{self.pool}}}"

    @cached_property
    def anchor(self) -> str:
        """Never written: it tells the slot of all keys of the pool."""
        return f"{self._base}:-"

    @cached_property
    def history(self) -> str:
        return f"{self._base}:history"

    @cached_property
    def first_tokens(self) -> str:
        return f"{self._base}:first_tokens"

    @cached_property
    def replicas(self) -> str:
        return f"{self._base}:replicas"

    @cached_property
    def breakers(self) -> str:
        return f"{self._base}:breakers"

    @cached_property
    def active(self) -> str:
        return f"{self._base}:active"

    @cached_property
    def backlog_tokens(self) -> str:
        return f"{self._base}:backlog_tokens"

    @cached_property
    def owned_tokens(self) -> str:
        return f"{self._base}:owned_tokens"

    @cached_property
    def turn(self) -> str:
        return f"{self._base}:turn"

    @cached_property
    def gateways(self) -> str:
        return f"{self._base}:gateways"

    @cached_property
    def lost_gateways(self) -> str:
        return f"{self._base}:lost_gateways"

    @cached_property
    def reaped(self) -> str:
        return f"{self._base}:reaped"

    @cached_property
    def leases(self) -> str:
        return f"{self._base}:leases"

    @cached_property
    def agents(self) -> str:
        return f"{self._base}:agents"

    @cached_property
    def engines(self) -> str:
        return f"{self._base}:engines"

    @cached_property
    def progress(self) -> str:
        return f"{self._base}:progress"

    @cached_property
    def asks(self) -> str:
        return f"{self._base}:asks"

    @cached_property
    def reports(self) -> str:
        return f"{self._base}:reports"

    @cached_property
    def entries(self) -> str:
        return f"{self._base}:entries"

    @cached_property
    def restating(self) -> str:
        return f"{self._base}:restating"

    @cached_property
    def cursors(self) -> str:
        return f"{self._base}:cursors"

    @cached_property
    def unreadable(self) -> str:
        return f"{self._base}:unreadable"

    @cached_property
    def tiers(self) -> str:
        return f"{self._base}:tiers"

    @cached_property
    def subsets(self) -> str:
        return f"{self._base}:subsets"

    @cached_property
    def subsets_of(self) -> str:
        return f"{self._base}:subsets_of"

    @cached_property
    def subset_active(self) -> str:
        return f"{self._base}:subset_active"

    def subset(self, digest: str) -> str:
        return f"{self._base}:subset:{digest}"

    @cached_property
    def forgotten(self) -> str:
        return f"{self._base}:forgotten"

    @cached_property
    def draining(self) -> str:
        return f"{self._base}:draining"

    @cached_property
    def view(self) -> str:
        return f"{self._base}:view"

    @cached_property
    def view_changes(self) -> str:
        return f"{self._base}:view_changes"

    @cached_property
    def waiting(self) -> str:
        return f"{self._base}:waiting"

    @cached_property
    def waiting_tokens(self) -> str:
        return f"{self._base}:waiting_tokens"

    @cached_property
    def holds(self) -> str:
        return f"{self._base}:holds"

    @cached_property
    def rates(self) -> str:
        return f"{self._base}:rates"

    @cached_property
    def speeds(self) -> str:
        return f"{self._base}:speeds"

    @cached_property
    def fair(self) -> str:
        return f"{self._base}:fair"

    @cached_property
    def paces(self) -> str:
        return f"{self._base}:paces"

    @cached_property
    def patient(self) -> str:
        return f"{self._base}:patient"

    @cached_property
    def tenants(self) -> str:
        """Of all pools, where one script can use their keys."""
        return f"{self._base if self.is_in_cluster else prefix(self.namespace)}:tenants"

    def seats(self, gateway: str) -> str:
        return f"{self._base}:seats:{gateway}"

    def turns(self, line: str) -> str:
        return f"{self._base}:turns:{line}"

    def line(self, line: str, tenant: str) -> str:
        return f"{self._base}:line:{line} {tenant}"

    def charges(self, gateway: str) -> str:
        return f"{self._base}:charges:{gateway}"

    def budgets(self, gateway: str) -> str:
        return f"{self._base}:budgets:{gateway}"

    def grants(self, gateway: str) -> str:
        return f"{self._base}:grants:{gateway}"

    def heard(self, gateway: str) -> str:
        return f"{self._base}:heard:{gateway}"

    def chunk(self, key: str) -> str:
        return f"{self._base}:chunk:{key}"

    def events(self, replica: str) -> str:
        return f"{self._base}:events:{replica}"

    def measured(self, replica: str) -> str:
        return f"{self._base}:measured:{replica}"

    def flight(self, gateway: str) -> str:
        return f"{self._base}:flight:{gateway}"

    def held(self, replica: str) -> str:
        return f"{self._base}:held:{replica}"

    @cached_property
    def own(self) -> Callable[[str], str]:
        """Spells `own:<key>`: the fastest way there is, as whole chains are spelled on the request path."""
        return f"{self._base}:own:".__add__

    @cached_property
    def bound(self) -> str:
        """The base of `bound:0` and `bound:1`: see pool/placed_chains.py."""
        return f"{self._base}:bound"

    def bound_slot(self, slot: int) -> str:
        return f"{self.bound}:{slot}"

    def response(self, response_id: str) -> str:
        return f"{self._base}:response:{response_id}"
