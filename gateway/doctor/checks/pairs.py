"""Whether pairs of prefill and decode can work, and do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from coordinator.engine.kv_transfers import KvTransfers
from coordinator.finding import FindingKind, Result, Unchecked
from gateway.doctor.evidence import Evidence, ReplicaEvidence, Unknown

ONLY_PREFILL = FindingKind(
    "pool-only-prefill",
    "error",
    "all its replicas compute prompts for others, so nobody answers requests for its models",
    "give a replica of it the label kvgate.io/role: decode, or remove the label (docs/disaggregation.md)",
)
LACKS_ROLE = FindingKind(
    "pool-lacks-role",
    "warning",
    "without the other role, these replicas work for nobody or compute their own prompts",
    "give a replica of the pool the role that it lacks, or remove the labels (docs/disaggregation.md)",
)
OTHER_CONNECTOR = FindingKind(
    "pairs-other-connector",
    "warning",
    "no KV cache can go from or to it, so prompts are computed twice or late",
    "start all replicas that have a role with the connector of pairs.protocol (--kv-transfer-config), or set the "
    "gateways' pairs.protocol to theirs",
)
FAIL = FindingKind(
    "pairs-fail",
    "warning",
    "requests wait for it in vain, and then their prompts are computed where they are decoded",
    "no_reference: pairs.protocol must be the connector that its vLLM has. no_engine_id: likewise, and its label "
    "kvgate.io/bootstrap-port must be the port of its bootstrap server, if that is not 8998. unstored: its LMCache "
    "must use the gateways' Redis, and be fast enough. Else its log says why (docs/disaggregation.md has all words)",
)
UNFETCHED = FindingKind(
    "pairs-not-fetched",
    "warning",
    "decode computes these prompts again, and their blocks are held for nothing",
    "let the engines reach each other: NIXL's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST must be an address that the "
    "others reach) and the ports of the transfer; the logs of those that decode say what fails",
)
_LEAST_EXPIRED = 5


def roles(evidence: Evidence) -> Iterator[Result]:
    """Whether each pool with roles has replicas that compute prompts, and some that decode."""
    said = _roles(evidence)
    listed = {replica for gateway in evidence.gateways for replica in (*gateway.replicas, *gateway.not_ready)}
    for pool in evidence.pools:
        found = {said.get(record.replica, "both") for record in pool.records() if record.replica in listed}
        if found == {"prefill"}:
            yield ONLY_PREFILL.seen(pool.subject, "each of its replicas has the role prefill")
        elif len(alone := found & {"prefill", "decode"}) == 1:
            yield LACKS_ROLE.seen(pool.subject, f"replicas have the role {alone.pop()}, and none has the other one")


def connectors(evidence: Evidence) -> Iterator[Result]:
    """Whether each replica with a role has the connector that gateways ask for, as far as its metrics tell."""
    said = _roles(evidence)
    protocol = next((each.pairs_protocol for each in evidence.gateways if each.pairs_protocol), "")
    for replica in evidence.replicas() if protocol else ():
        told = replica.transfers
        if said.get(replica.id) not in ("prefill", "decode") or not replica.answers:
            continue
        if isinstance(told, Unknown):
            yield Unchecked(replica.subject, "its connector for pairs", told.why)
        elif protocol not in told.connectors and (told.connectors or _tells_nixl(replica, protocol)):
            has = f"are those of {' and '.join(sorted(told.connectors))}" if told.connectors else "show no connector"
            yield OTHER_CONNECTOR.seen(replica.subject, f"pairs.protocol is {protocol}, and its metrics {has}")


def legs(evidence: Evidence) -> Iterator[Result]:
    """Whether replicas compute what others ask for, as gateways say. One that is not ready has another finding."""
    ready = {record.replica for pool in evidence.pools for record in pool.records() if record.state == "ready"}
    total, failed = Counter[str](), dict[str, Counter[str]]()
    for gateway in evidence.gateways:
        for replica, told in gateway.failing_prefills.items():
            total[replica] += told.legs
            failed.setdefault(replica, Counter()).update(told.failed)
    for replica in sorted(failed.keys() & ready):
        words = ", ".join(f"{word} {count}" for word, count in failed[replica].most_common())
        what = f"{failed[replica].total()} of the last {total[replica]} prompts that it was to compute failed: {words}"
        yield FAIL.seen(f"replica {replica}", what)


def fetched(evidence: Evidence) -> Iterator[Result]:
    """Whether decode gets what others have computed for it."""
    for pool in evidence.pools:
        told = [each.transfers for each in pool.replicas if isinstance(each.transfers, KvTransfers)]
        expired, done = sum(each.expired for each in told), sum(each.done for each in told)
        if expired >= _LEAST_EXPIRED and expired > done:
            what = f"since engines started, {done:.0f} prompts were fetched, and {expired:.0f} computed in vain"
            yield UNFETCHED.seen(pool.subject, what)


CHECKS = (roles, connectors, legs, fetched)


def _tells_nixl(replica: ReplicaEvidence, protocol: str) -> bool:
    """Whether its metrics would show the connector: vLLM's front end in Rust, older versions' Mooncake and LMCache do
    not."""
    return protocol == "nixl" and not isinstance(replica.cache, Unknown)


def _roles(evidence: Evidence) -> dict[str, str]:
    return {replica: role for gateway in evidence.gateways for replica, role in gateway.roles.items()}
