"""Runs all checks on the evidence. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.finding import Finding, FindingKind, Result, Unchecked
from coordinator.redis import checks as redis_checks
from gateway.doctor.checks import agents, clocks, gateways, lmcache, models, pairs, replicas, tenants
from gateway.doctor.evidence import Evidence, Unknown

MODULES = (redis_checks, gateways, replicas, models, pairs, agents, clocks, lmcache, tenants)


_OF_ALL = (
    *(*gateways.CHECKS, *models.CHECKS, *pairs.CHECKS, *replicas.CHECKS_OF_ALL),
    *(*clocks.CHECKS, *lmcache.CHECKS, *tenants.CHECKS),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, what could not be checked, how many checks were made, and on what."""

    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...]
    checks: int
    looked_at: str

    def told(self) -> dict[str, Any]:
        """For programs."""
        fields = ("code", "severity", "subject", "what", "why", "fix")
        return {
            "findings": [{name: getattr(one, name) for name in fields} for one in self.findings],
            "unchecked": [{"subject": one.subject, "what": one.what, "why": one.why} for one in self.unchecked],
            "checks": self.checks,
            "looked_at": self.looked_at,
        }


def examine(evidence: Evidence) -> Diagnosis:
    """Run every check."""
    answers = list(_answers(evidence))
    results = [result for each in answers for result in each]
    return Diagnosis(
        findings=tuple(dict.fromkeys(result for result in results if isinstance(result, Finding))),
        unchecked=tuple(dict.fromkeys(result for result in results if isinstance(result, Unchecked))),
        checks=sum(not any(isinstance(result, Unchecked) for result in each) for each in answers),
        looked_at=_looked_at(evidence),
    )


def kinds() -> list[FindingKind]:
    """All that can be found, in the order of the checks. If several have one code, the first stands for them."""
    found = [value for module in MODULES for value in vars(module).values() if isinstance(value, FindingKind)]
    return [kind for i, kind in enumerate(found) if kind.code not in {earlier.code for earlier in found[:i]}]


def _answers(evidence: Evidence) -> Iterator[list[Result]]:
    """The results of each check on each thing."""
    if isinstance(evidence.redis, Unknown):
        yield [redis_checks.UNREACHABLE.seen(redis_checks.SUBJECT, evidence.redis.why)]
    else:
        for of_server in redis_checks.CHECKS:
            yield list(of_server(evidence.redis))
    for of_all in _OF_ALL:
        yield list(of_all(evidence))
    for replica in evidence.replicas():
        for of_replica in replicas.CHECKS if replica.answers else (replicas.health,):
            yield list(of_replica(replica))
    for pool in evidence.pools:
        for of_pool in replicas.CHECKS_OF_POOL:
            yield list(of_pool(pool))
        if pool.snapshots:
            for of_agents in agents.CHECKS:
                yield list(of_agents(pool))


def _looked_at(evidence: Evidence) -> str:
    redis = (
        []
        if isinstance(evidence.redis, Unknown)
        else [f"Redis ({redis_checks.RANDOM_PICKS} random picks of {evidence.redis.keys} keys)"]
    )
    counted = {
        "gateway": sum(not gateway.problem for gateway in evidence.gateways),
        "replica": len(evidence.replicas()),
        "agent": sum(len(pool.last.state.agents) for pool in evidence.pools if pool.snapshots),
        "LMCache server": len(evidence.lmcache),
    }
    some = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counted.items() if count]
    return ", ".join(redis + some)
