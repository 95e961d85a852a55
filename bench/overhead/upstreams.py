"""The canned servers behind the proxies: their start, and what they answer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import httpx

from bench.overhead.shapes import Answer
from bench.server_process import running_servers


def upstreams(count: int) -> AbstractContextManager[list[str]]:
    """The URLs of so many servers."""
    return running_servers("bench.overhead.canned", count)


def set_answer(url: str, answer: Answer) -> None:
    """From now on, all of the servers answer so. `url` is that of one of them."""
    httpx.post(f"{url}/canned?tokens={answer.tokens}&pace_ms={answer.pace_ms}").raise_for_status()
