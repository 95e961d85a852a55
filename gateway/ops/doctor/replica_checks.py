"""Whether each replica serves, caches prefixes, and can tell what it caches to nobody but its agent."""

from __future__ import annotations

import re
from collections.abc import Iterator

from coordinator.finding import FindingKind, Result, Unchecked
from gateway.ops.doctor.evidence import ReplicaEvidence, Unknown

_NAMES_SESSIONS = (0, 30)
_NUMBERS = re.compile(r"\d+")

UNHEALTHY = FindingKind(
    "replica-unhealthy",
    "error",
    "gateways send it nothing once their health checks fail as well",
    "look into its log and start it again: curl -i {url}/health has to answer 200",
)
BEFORE_SESSIONS = FindingKind(
    "vllm-names-no-sessions",
    "warning",
    "its events do not name requests: gateways ask for each prompt's token ids instead, which costs time and traffic",
    "install vLLM 0.30 or newer",
)
NOT_CACHING = FindingKind(
    "prefix-caching-off",
    "error",
    "it computes every prompt anew: there is nothing to route to",
    "start vLLM with --enable-prefix-caching",
)
PUBLISHES_NOTHING = FindingKind(
    "events-off",
    "warning",
    "what it holds is guessed from what it was sent: evictions and restarts are not seen",
    "start vLLM with --kv-events-config and an agent beside it (kvgate replica-command prints both)",
)
EXPOSED = FindingKind(
    "events-exposed",
    "error",
    "KV events hold the prompts' tokens, and whoever connects gets them",
    "publish on ipc:///run/vllm/events, or on tcp://[::ffff:127.0.0.1]:PORT (replays on tcp://127.0.0.1:PORT); or let "
    "no host but the agent's through to it (docs/security.md)",
)


def health(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether it can serve."""
    if replica.problem:
        yield UNHEALTHY.seen(replica.subject, f"{replica.url}: {replica.problem}", url=replica.url)
    if not replica.answers:
        yield Unchecked(replica.subject, "its version, settings, events and clock", "it does not answer")


def version(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether its events name requests."""
    if isinstance(replica.version, Unknown):
        yield Unchecked(replica.subject, "vLLM's version", replica.version.why)
        return
    number = tuple(int(part) for part in _NUMBERS.findall(replica.version)[:2])
    if len(number) < 2:
        yield Unchecked(replica.subject, "vLLM's version", f"{replica.version!r} is no number")
    elif number < _NAMES_SESSIONS:
        yield BEFORE_SESSIONS.seen(replica.subject, f"it runs vLLM {replica.version}")


def caching(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether it keeps prefixes."""
    if isinstance(replica.cache, Unknown):
        yield Unchecked(replica.subject, "its cache's settings", replica.cache.why)
    elif replica.cache.get("enable_prefix_caching") == "False":
        yield NOT_CACHING.seen(replica.subject, "enable_prefix_caching is False in its vllm:cache_config_info")


def events(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether it publishes what it caches."""
    if isinstance(replica.endpoints, Unknown):
        yield Unchecked(replica.subject, "whether its KV events can be reached from here", replica.endpoints.why)
    elif not replica.endpoints:
        yield PUBLISHES_NOTHING.seen(replica.subject, "/kv_event_sources names no ZeroMQ publisher")


def exposure(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether others than its agent can hear that."""
    reached = replica.open_endpoints
    if isinstance(reached, Unknown):
        yield Unchecked(replica.subject, "whether its KV events can be reached from here", reached.why)
        return
    for endpoint, address in reached.items():
        yield EXPOSED.seen(replica.subject, f"{endpoint} answers on {address}, from here")


CHECKS = (health, version, caching, events, exposure)
