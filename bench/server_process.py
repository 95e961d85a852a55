"""Servers of a module of the bench, all in one process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from gateway.ops.local.ports import free_ports


@contextmanager
def running_servers(module: str, count: int) -> Iterator[list[str]]:
    """The URLs of so many servers. The module takes `--ports`, and answers /health. Raises httpx.HTTPError if it does
    not start."""
    ports = free_ports(count)
    process = subprocess.Popen([sys.executable, "-m", module, "--ports", ",".join(map(str, ports))])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            client.get(f"http://127.0.0.1:{ports[-1]}/health").raise_for_status()
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        process.kill()
        process.wait()
