"""Real replicas, started from the commands that `kvgate replica-command` prints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

from bench.vllm import install, printed
from bench.vllm.server import Server
from tests.redis_server import RedisServer

CHUNK_TOKENS = 512
"""The chunk size for the tiny model: at 2 KiB a token a chunk has 1 MiB."""
PREFIX = "kvchunk"
TTL_SECONDS = 600
ANSWER_TOKENS = 12


@dataclass
class Answer:
    text: str
    logprobs: list[float] = field(repr=False)
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    def says_what(self, other: Answer) -> bool:
        """Whether both answers have the same words with nearly the same log probabilities."""
        close = all(abs(mine - its) < 1e-3 for mine, its in zip(self.logprobs, other.logprobs, strict=True))
        return self.text == other.text and close


def question(prompt: str, max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """The body of a chat whose answer depends on the prompt alone."""
    return {
        "model": install.MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@dataclass
class Replica:
    """An engine, and LMCache's server if it has one."""

    engine: Server
    server: Server | None
    agent: printed.Printed
    """Not started: these tests have no gateway that would use its data."""
    http: httpx.Client = field(repr=False)

    def ask(self, prompt: str, max_tokens: int = ANSWER_TOKENS) -> Answer:
        body = {**question(prompt, max_tokens), "logprobs": True}
        started = time.monotonic()
        response = self.http.post(f"{self.engine.url}/v1/chat/completions", json=body)
        seconds = time.monotonic() - started
        said = response.raise_for_status().json()
        choice, usage = said["choices"][0], said["usage"]
        return Answer(
            text=choice["message"]["content"],
            logprobs=[each["logprob"] for each in choice["logprobs"]["content"]],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            seconds=seconds,
        )

    def forget(self) -> None:
        """Empty only the engine's own cache."""
        self.http.post(f"{self.engine.url}/reset_prefix_cache").raise_for_status()

    def forget_cpu(self) -> None:
        """Empty only the CPU memory of LMCache's server."""
        assert self.server is not None
        self.http.post(f"{self.server.url}/cache/clear").raise_for_status()


@contextmanager
def running(folder: Path, *files: dict[str, Any], secrets: dict[str, str] | None = None) -> Iterator[list[Replica]]:
    """Runs a replica for each file. Starts all at the same time and kills them on exit. Logs are in `folder`."""
    with httpx.Client(timeout=120) as http, printed.running(folder, files, secrets) as started:
        replicas = [Replica(each.engine, each.server, each.agent, http) for each in started]
        for replica in replicas:
            replica.ask("the first request takes longer")
        yield replicas


class Chunks:
    """The chunks that LMCache has stored in Redis."""

    def __init__(self, server: RedisServer) -> None:
        self.client = redis.Redis(port=server.port)

    def keys(self) -> set[bytes]:
        return set(self.client.scan_iter(f"{PREFIX}@*"))

    def new_since(self, before: set[bytes], count: int, within_s: float = 10) -> set[bytes]:
        """The keys of at least `count` chunks that are not in `before`. It waits: LMCache stores after the answer."""
        deadline = time.monotonic() + within_s
        while len(found := self.keys() - before) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} chunks are in Redis after {within_s} s"
            self.client.ping()
        return found
