"""The replicas that get the requests: simulated in scaled time, or real vLLM, started here or already running."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import running_replicas
from bench.load import BLOCK_TOKENS, MODEL
from bench.routing.mixes import Mix
from bench.vllm import install
from bench.vllm.replicas import BLOCK_TOKENS as BLOCK_TOKENS_ON_CPUS
from bench.vllm.replicas import running_replicas as vllm_replicas

# Calibrated to published figures of LLaVA-OneVision-7B on A40s in eager mode: a cold image of 6.5k tokens takes 1.4 s,
# and 60 tokens of an answer take 2 s. With these values, round_robin has the published p95 in the mix `images`.
PREFILL_TOKENS_PER_S = 4700.0
DECODE_S_PER_TOKEN = 0.035
_HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?\{.*\} (\S+)$", re.MULTILINE)
_QUERIES = re.compile(r"^vllm:prefix_cache_queries(?:_total)?\{.*\} (\S+)$", re.MULTILINE)
_BLOCK_TOKENS = re.compile(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)".*\} 1(?:\.0)?$', re.MULTILINE)
_ANSWERED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fleet:
    """Replicas that serve, with empty caches."""

    engine: str
    urls: Mapping[str, str]
    """By replica."""
    model: str
    block_tokens: int
    speed: float
    """Divides the engines' times. It is 1 for real engines."""
    redis_url: str | None = None
    """The Redis of agents that already run. Without it, gateways start with their own Redis and agents."""
    config: dict[str, Any] = field(default_factory=dict)
    """More sections of the gateways' configuration."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What else `kvgate up --replica` is told: `events=tcp://…,replay=tcp://…` of an engine that does not tell so."""

    def counters(self) -> list[Counters]:
        """The engines' counters, in the order of `urls`."""
        return [_counters(url) for url in self.urls.values()]


@dataclass(frozen=True)
class Counters:
    """The counters of one engine since its start."""

    queries_tokens: float
    hits_tokens: float
    requests: float

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.queries_tokens - before.queries_tokens,
            self.hits_tokens - before.hits_tokens,
            self.requests - before.requests,
        )


def _counters(url: str) -> Counters:
    text = httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text
    found = [each.findall(text) for each in (_QUERIES, _HITS, _ANSWERED)]
    if not all(found):
        raise RuntimeError(f"{url}/metrics lacks vllm:prefix_cache_queries, _hits or vllm:request_success_total")
    queries, hits, answered = (sum(map(float, each)) for each in found)
    return Counters(queries, hits, answered)


def cache_share(counters: Sequence[Counters]) -> float:
    """The share of prompt tokens that the engines found in their caches."""
    queries = sum(each.queries_tokens for each in counters)
    return sum(each.hits_tokens for each in counters) / queries if queries else 0.0


Fresh = Callable[[], AbstractContextManager[Fleet]]
"""Starts a fleet with empty caches. It can be called again and again."""


@contextmanager
def simulated(mix: Mix, speed: float) -> Iterator[Fresh]:
    """Simulated fleets for the mix. Each is started anew."""
    yield lambda: _simulated(mix, speed)


@contextmanager
def _simulated(mix: Mix, speed: float) -> Iterator[Fleet]:
    arguments = {
        "--speed": speed,
        "--num-gpu-blocks": mix.capacity_tokens // BLOCK_TOKENS,
        "--prefill-tokens-per-s": PREFILL_TOKENS_PER_S,
        "--decode-s-per-token": DECODE_S_PER_TOKEN,
    }
    flat = tuple(str(part) for pair in arguments.items() for part in pair)
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        running_replicas(Path(folder), mix.replicas, flat) as replicas,
    ):
        yield Fleet("simulated", {replica.id: replica.url for replica in replicas}, MODEL, BLOCK_TOKENS, speed)


@contextmanager
def real(mix: Mix) -> Iterator[Fresh]:
    """One fleet of real vLLM with the mix's cache size for its real model. Its caches are emptied before each use."""
    install.install(install.SMALL)
    blocks = mix.real_capacity_tokens // BLOCK_TOKENS_ON_CPUS
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        vllm_replicas(Path(folder), mix.replicas, blocks, install.SMALL) as replicas,
    ):
        urls = {replica.id: replica.url for replica in replicas}
        fleet = Fleet(f"vLLM {install.VERSION} on CPUs", urls, install.MODEL, BLOCK_TOKENS_ON_CPUS, 1.0)
        yield lambda: nullcontext(_emptied(fleet))


@contextmanager
def running(_mix: Mix, replicas: Sequence[str]) -> Iterator[Fresh]:
    """vLLM that somebody else has started with VLLM_SERVER_DEV_MODE=1. Its caches are emptied before each use. A
    replica is a URL, and what Fleet.beside says, after a comma. Raises httpx.HTTPError if one does not answer, and
    RuntimeError if they differ."""
    told = {f"r{number}": replica.partition(",") for number, replica in enumerate(replicas)}
    urls = {name: url.rstrip("/") for name, (url, _, _) in told.items()}
    engines = {name: _engine(url) for name, url in urls.items()}
    if len(set(engines.values())) > 1:
        raise RuntimeError(f"the replicas differ in version, model or block size: {engines}")
    version, model, block_tokens = engines["r0"]
    beside = {name: text for name, (_, _, text) in told.items()}
    fleet = Fleet(f"vLLM {version}, {model}", urls, model, block_tokens, 1.0, beside=beside)
    yield lambda: nullcontext(_emptied(fleet))


def _engine(url: str) -> tuple[str, str, int]:
    """Its version, its model, and the tokens of a block."""
    with httpx.Client(base_url=url, timeout=10) as http:
        version, models, metrics = (
            http.get(path).raise_for_status() for path in ("/version", "/v1/models", "/metrics")
        )
    block = _BLOCK_TOKENS.search(metrics.text)
    if block is None:
        raise RuntimeError(f"{url}/metrics lacks vllm:cache_config_info")
    return str(version.json()["version"]), str(models.json()["data"][0]["id"]), int(block[1])


def _emptied(fleet: Fleet) -> Fleet:
    body = {"model": fleet.model, "max_tokens": 1, "messages": [{"role": "user", "content": "vLLM tells of it now"}]}
    with httpx.Client(timeout=60) as http:
        for url in fleet.urls.values():
            http.post(f"{url}/reset_prefix_cache").raise_for_status()
            if (answer := http.post(f"{url}/reset_mm_cache")).status_code != 404:  # images that earlier runs decoded
                answer.raise_for_status()
            http.post(f"{url}/v1/chat/completions", json=body).raise_for_status()  # sends the reset's event, too
    return fleet
