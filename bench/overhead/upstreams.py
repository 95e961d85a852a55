"""The canned servers behind the proxies: their start, and what they answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from bench.overhead.shapes import Answer
from gateway.ops.local.ports import free_ports


@contextmanager
def upstreams(count: int = 2) -> Iterator[list[str]]:
    """The URLs of so many servers, all in one process."""
    ports = free_ports(count)
    command = [sys.executable, "-m", "bench.overhead.canned", "--ports", ",".join(map(str, ports))]
    process = subprocess.Popen(command)
    try:
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(transport=transport) as client:
            client.get(f"http://127.0.0.1:{ports[-1]}/health").raise_for_status()
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        process.kill()
        process.wait()


def set_answer(url: str, answer: Answer) -> None:
    """From now on, all of the servers answer so. `url` is that of one of them."""
    httpx.post(f"{url}/canned?tokens={answer.tokens}&pace_ms={answer.pace_ms}").raise_for_status()
