"""Whether LMCache's servers answer and make the same chunks."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import FindingKind, Result
from gateway.doctor.evidence import Evidence, grouped

LMCACHE_UNREACHABLE = FindingKind(
    "lmcache-unreachable",
    "error",
    "its vLLM waits for it and then computes the chunks that it stores",
    "start it again, or correct --lmcache (its --http-port): curl {url}/healthcheck",
)
LMCACHE_DIFFERS = FindingKind(
    "lmcache-differs",
    "warning",
    "the servers cut and name chunks differently, so replicas do not find each other's",
    "start all servers with the same --chunk-size and --hash-algorithm (kvgate replica-command)",
)


def lmcache(evidence: Evidence) -> Iterator[Result]:
    """Whether the given servers answer and make the same chunks."""
    answering = [server for server in evidence.lmcache if not server.problem]
    for server in evidence.lmcache:
        if server.problem:
            yield LMCACHE_UNREACHABLE.seen(f"LMCache {server.url}", server.problem, url=server.url)
    for what, values in (
        ("chunk_size", {server.url: server.chunk_tokens for server in answering}),
        ("hash_algorithm", {server.url: server.hash_algorithm for server in answering}),
    ):
        if differing := grouped(values):
            yield LMCACHE_DIFFERS.seen("LMCache", f"{what} {differing}")


CHECKS = (lmcache,)
