"""Whether the gateways are one cluster: in one Redis, of one version, with the same settings, hashing alike."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import FindingKind, Result, Unchecked
from coordinator.redis import checks as redis_checks
from gateway.doctor.evidence import Evidence, GatewayEvidence, Unknown, grouped

_MOST_NAMED = 5
UNREACHABLE = FindingKind(
    "gateway-unreachable",
    "error",
    "clients get no answer if a load balancer sends them there",
    "start it again, or correct --gateway: curl -i {url}/ready must answer 200",
)
NOT_READY = FindingKind(
    "gateway-not-ready",
    "error",
    "it cannot serve, so load balancers send it nothing",
    "start the replicas that it names, or correct their URLs in its `replicas`; {url}/ready says when it can serve",
)
WITHOUT_STORE = FindingKind(
    "gateway-without-redis",
    "error",
    "it routes by hashing alone, without knowing the load or what other gateways placed",
    "check that it reaches Redis within redis.budget_ms, its URL and password, and `store down` in its log",
)
ELSEWHERE = FindingKind(
    "gateway-in-other-redis",
    "error",
    "gateways with different Redis servers do not see each other's load and placements",
    "give all gateways and agents, and the doctor (--redis-namespace), the same redis.url "
    "(KVGATE_REDIS_URL), including the database, and the same redis.namespace",
)
CONFIG_WRONG = FindingKind(
    "gateway-config-not-used",
    "error",
    "it goes on with the settings of before, and would not start again",
    "correct the file: kvgate check-config FILE; it is read again by itself",
)
NEEDS_RESTART = FindingKind(
    "gateway-needs-restart",
    "warning",
    "its file says something else than it does, until it starts again",
    "restart the gateways one by one (docs/how-to/upgrade.md; kvgate down and up), or take that back",
)
RECORDS_IGNORED = FindingKind(
    "records-ignored",
    "error",
    "gateways with another secret do not hear of its keys and revocations; or somebody else has written to Redis",
    "give all gateways the same security.records_secret (KVGATE_RECORDS_SECRET). If they have it, find out who "
    "can write to Redis (docs/security.md), and remove the record (docs/how-to/rotate-a-key.md)",
)
OLDER_KEYS = FindingKind(
    "gateway-keys-older",
    "warning",
    "the API keys of the newest file count at all gateways, and those of its own file do not",
    "give it the file of the others (docs/how-to/change-the-configuration.md)",
)
VERSIONS_DIFFER = FindingKind(
    "gateway-versions-differ",
    "warning",
    "two versions may give one prompt different keys, or write different records",
    "finish the upgrade: run one version in all gateways",
)
SETTINGS_DIFFER = FindingKind(
    "gateway-settings-differ",
    "warning",
    "what happens to a request depends on which gateway gets it",
    "give all gateways one file; only id, host, ports and log may differ (kvgate check-config FILE)",
)
KEYS_DIFFER = FindingKind(
    "gateway-keys-differ",
    "error",
    "they give one prompt different keys, so no gateway finds what another placed",
    "run one version, with the same KVGATE_CACHE_SALT_SECRET, api_keys and share_cache, in all gateways",
)
VIEWS_DIFFER = FindingKind(
    "gateway-views-differ",
    "warning",
    "each gateway sends requests only to replicas that are in its own configuration and that it can reach",
    "give all the same `replicas`; the /ready of each gateway says why it lacks some",
)


def reached(evidence: Evidence) -> Iterator[Result]:
    """Whether each answers and can serve."""
    if not evidence.gateways:
        yield Unchecked("gateways", "whether they serve and agree", "none was asked: give each one's --gateway URL")
    for gateway in evidence.gateways:
        if gateway.problem:
            yield UNREACHABLE.seen(gateway.subject, gateway.problem, url=gateway.url)
        elif not gateway.is_ready:
            yield NOT_READY.seen(gateway.subject, "; ".join(gateway.reasons), url=gateway.url)


def configuration(evidence: Evidence) -> Iterator[Result]:
    """Whether each uses its configuration file as it is."""
    for gateway in _answering(evidence):
        if gateway.config_problems:
            yield CONFIG_WRONG.seen(gateway.subject, f"its file is wrong: {'; '.join(gateway.config_problems)}")
        elif gateway.needs_a_restart:
            yield NEEDS_RESTART.seen(gateway.subject, f"differs from its file: {', '.join(gateway.needs_a_restart)}")


def store(evidence: Evidence) -> Iterator[Result]:
    """Whether each places through this Redis."""
    present = {name for pool in evidence.pools if pool.snapshots for name in pool.last.gateway_leases_ms}
    for gateway in _answering(evidence):
        if gateway.store_problem:
            yield WITHOUT_STORE.seen(gateway.subject, f"its store is down: {gateway.store_problem}")
        elif gateway.pools and not isinstance(evidence.redis, Unknown) and gateway.id not in present:
            yield ELSEWHERE.seen(
                gateway.subject, f"{gateway.id} says that its store is up, but has no lease in this Redis"
            )


def records(evidence: Evidence) -> Iterator[Result]:
    """Whether each trusts all records of keys."""
    for gateway in _answering(evidence):
        if gateway.ignored_records:
            told = "; ".join(f"{name}: {why}" for name, why in list(gateway.ignored_records.items())[:_MOST_NAMED])
            count = len(gateway.ignored_records)
            yield RECORDS_IGNORED.seen(gateway.subject, f"it ignores {count} records in Redis: {told}")


def files_of_keys(evidence: Evidence) -> Iterator[Result]:
    """Whether the keys of each one's file count."""
    for gateway in _answering(evidence):
        if gateway.has_older_keys:
            yield OLDER_KEYS.seen(gateway.subject, "another gateway has a newer file with other `security.api_keys`")


def watch(evidence: Evidence) -> Iterator[Result]:
    """What the watch reports about Redis, unless the doctor finds the same itself."""
    said = _said_of_redis(evidence)
    for gateway in _answering(evidence):
        for condition, warning in gateway.store_warnings.items():
            if condition not in said:
                yield redis_checks.WATCH_WARNS.seen("Redis", f"{gateway.name} says: {warning}")


def unasked(evidence: Evidence) -> Iterator[Result]:
    """Whether all gateways that have a lease in Redis were asked."""
    asked = {gateway.id for gateway in evidence.gateways}
    live = {
        name
        for pool in evidence.pools
        for snapshot in pool.snapshots[-1:]
        for name, until_ms in snapshot.gateway_leases_ms.items()
        if until_ms >= snapshot.state.now_ms
    }
    if evidence.gateways and not all(gateway.problem == "" for gateway in evidence.gateways):
        return  # one that does not answer may be the one that was not asked
    for name in sorted(live - asked):
        yield Unchecked(f"gateway {name}", "whether it agrees with the others", "it was not asked: add --gateway URL")


def agreement(evidence: Evidence) -> Iterator[Result]:
    """Whether they have the same version and settings."""
    gateways = _answering(evidence)
    subject = "gateways"
    if differing := grouped({_name(evidence, each): each.version for each in gateways}):
        yield VERSIONS_DIFFER.seen(subject, f"KVGate {differing}")
        return  # each version has other settings, so the digests of equal files differ
    sections = sorted({section for each in gateways for section in each.settings})
    for section in sections:
        values = {_name(evidence, each): each.settings.get(section, "not told") for each in gateways}
        if grouped(values):
            yield SETTINGS_DIFFER.seen(subject, f"`{section}` is not the same: {_camps(values)}")


def views(evidence: Evidence) -> Iterator[Result]:
    """Whether they see the same replicas, and the same ones as exact."""
    gateways = [gateway for gateway in _answering(evidence) if not gateway.store_problem]
    for what, seen in (
        ("ready", {_name(evidence, each): _list(each.replicas) for each in gateways}),
        ("exact", {_name(evidence, each): _list(each.exact) for each in gateways}),
    ):
        if differing := grouped(seen):
            yield VIEWS_DIFFER.seen("gateways", f"{what} replicas: {differing}")
            return


def keys(evidence: Evidence) -> Iterator[Result]:
    """Whether each would find what the others placed."""
    known = {}
    for gateway in _answering(evidence):
        if isinstance(gateway.keys, Unknown):
            yield Unchecked(gateway.subject, "whether its keys are the others'", gateway.keys.why)
        else:
            known[_name(evidence, gateway)] = gateway.keys[-1]
    if differing := grouped(known):
        yield KEYS_DIFFER.seen("gateways", f"the same prompt ends in key {differing}")


CHECKS = (reached, configuration, store, records, files_of_keys, watch, unasked, agreement, views, keys)


def _answering(evidence: Evidence) -> list[GatewayEvidence]:
    return [gateway for gateway in evidence.gateways if not gateway.problem]


def _said_of_redis(evidence: Evidence) -> set[str]:
    """The watch's conditions that a finding on Redis itself covers."""
    found = [] if isinstance(evidence.redis, Unknown) else redis_checks.findings(evidence.redis)
    return {condition for finding in found for condition in finding.kind.conditions}


def _name(evidence: Evidence, gateway: GatewayEvidence) -> str:
    """Its name, with its URL if another one has the same name."""
    is_unique = sum(each.name == gateway.name for each in evidence.gateways) == 1
    return gateway.name if is_unique else f"{gateway.name} ({gateway.url})"


def _camps(values: dict[str, str]) -> str:
    """Which gateways agree, without the values: these are digests that mean nothing to people."""
    return " | ".join(camp.rpartition(":")[0] for camp in grouped(values).split("; "))


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
