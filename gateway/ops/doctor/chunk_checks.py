"""Whether LMCache's chunks, where they are in the same Redis, can be evicted, and found by who looks for them. What a
chunk is called tells who wrote it, and for whom (coordinator/lmcache_chunks.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.lmcache_chunks import NAME
from coordinator.survey import SAMPLES, ForeignKey, Server
from gateway.ops.doctor.finding import Kind, Result, Unchecked

_SUBJECT = "LMCache's chunks"
_LARGE_BYTES = 4 * 2**20
_SHOWN = 60

NO_TTL = Kind(
    "chunks-without-ttl",
    "error",
    "they are never evicted: Redis fills, then refuses chunks and other writes",
    "write chunks with LMCache's valkey adapter and ttl_seconds (kvgate replica-command prints how); those there get a "
    "TTL from a gateway with store.watch: true",
)
TWO_KEYS = Kind(
    "chunks-of-redis-adapter",
    "warning",
    "LMCache's redis:// adapter sets no TTL, and halves of its pairs are evicted alone",
    "use its valkey adapter instead (kvgate replica-command prints how)",
)
LARGE = Kind(
    "chunks-too-large",
    "warning",
    "Redis serves one command at a time: placements wait for as long as a chunk takes to be copied",
    "lower lmcache.chunk_tokens (LMCache's --chunk-size) to chunks of 4 MiB, or give chunks a Redis of their own",
)
NAMES_DIFFER = Kind(
    "chunks-named-differently",
    "warning",
    "replicas find each other's chunks only under the same prefix, model path, world size and dtype",
    "start all replicas from one file (kvgate replica-command); what was written before goes with its TTL",
)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One of LMCache's keys. `naming` is what has to be equal for replicas to share it, in words."""

    name: str
    model: str
    naming: str
    is_half: bool
    has_ttl: bool
    size_bytes: int


def chunks_of(server: Server) -> list[StoredChunk]:
    """Those in the sample."""
    return [chunk for key in server.foreign if (chunk := _chunk(key)) is not None]


def _chunk(key: ForeignKey) -> StoredChunk | None:
    found = NAME.fullmatch(key.name)
    if found is None:
        return None
    if found["kv_rank"]:
        prefix, _, model = found["head"].rpartition("@")
        named = f"prefix {prefix}" if prefix else "no prefix"
        naming = f"{named}, model {model}, world size {int(found['kv_rank'][:2], 16)}"
    else:
        model = found["head"]
        naming = f"in process, model {model}, world size {found['world_size']}, {found['dtype']}"
    return StoredChunk(key.name, model, naming, found["half"] is not None, key.has_ttl, key.size_bytes)


def sampled(server: Server) -> Iterator[Result]:
    """Whether they could be looked at."""
    if "RANDOMKEY" in server.refused:
        why = f"the user of the URL may not look for them ({server.refused['RANDOMKEY']})"
        yield Unchecked(_SUBJECT, "TTLs, sizes, names", f"{why}: give an administrator's with --redis-url")


def expiry(server: Server) -> Iterator[Result]:
    """Whether each can be evicted."""
    chunks = chunks_of(server)
    if lasting := [chunk for chunk in chunks if not chunk.has_ttl]:
        like = f"{lasting[0].name[:_SHOWN]}…"  # what may follow names a tenant
        what = f"{len(lasting)} of {len(chunks)} chunks have no TTL, like {like} ({_sample(server)})"
        yield NO_TTL.seen(_SUBJECT, what)
    if any(chunk.is_half for chunk in chunks):
        yield TWO_KEYS.seen(_SUBJECT, "each chunk is two keys, of which one ends in kv_bytes and one in metadata")


def size(server: Server) -> Iterator[Result]:
    """Whether a chunk holds Redis up."""
    largest = max((chunk.size_bytes for chunk in chunks_of(server)), default=0)
    if largest > _LARGE_BYTES:
        yield LARGE.seen(_SUBJECT, f"one is {largest / 2**20:.1f} MiB ({_sample(server)})")


def names(server: Server) -> Iterator[Result]:
    """Whether replicas of one model look for the same names. Models are taken for one by the end of their path."""
    by_model: defaultdict[str, set[str]] = defaultdict(set)
    for chunk in chunks_of(server):
        by_model[chunk.model.rstrip("/").rpartition("/")[2].lower()].add(chunk.naming)
    for namings in by_model.values():
        if len(namings) > 1:
            yield NAMES_DIFFER.seen(_SUBJECT, "; ".join(sorted(namings)))


CHECKS = (sampled, expiry, size, names)


def _sample(server: Server) -> str:
    return f"seen in {SAMPLES} random picks of {server.keys} keys"
