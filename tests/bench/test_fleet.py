"""bench.fleet: light replicas beside the simulated replica, and small runs as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet.exchange import Exchange
from bench.fleet.replica import LightReplica
from bench.fleet.replicas import address_of, replica_url
from bench.fleet.settings import LightSettings
from gateway.ops.local.ports import free_ports
from gateway.simulator.server import serving
from gateway.simulator.settings import SimSettings

BLOCKS, SPEED = 24, 1000.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(*said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
    return {"model": "sim", "messages": messages, "max_tokens": 40} | more


LONG, OTHER = "a long document " * 40, "another long document " * 40
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(LONG)),
    (CHAT, chat(LONG)),
    (CHAT, chat(LONG, "yes", "and then?", **STREAMED)),
    (CHAT, chat(OTHER, **STREAMED)),
    (CHAT, chat(LONG)),  # partly evicted
    (CHAT, chat(LONG, cache_salt="a tenant")),
    (COMPLETIONS, {"model": "sim", "prompt": LONG, "max_tokens": 20}),
    (COMPLETIONS, {"model": "sim", "prompt": LONG, "max_tokens": 20, **STREAMED}),
    (COMPLETIONS, {"model": "sim", "prompt": list(range(300))}),
    (CHAT, chat(LONG, stop="an")),
    (CHAT, chat("too long " * 400)),
    (CHAT, chat("who?", model="nobody")),
]


@pytest.fixture
async def light() -> AsyncIterator[str]:
    """The URL of a light replica."""
    (port,) = free_ports(1)
    replica = LightReplica(0, address_of(0), port, LightSettings(num_blocks=BLOCKS, speed=SPEED))
    await replica.start(Exchange)
    yield replica_url(0, port)
    await replica.stop()


@pytest.fixture
async def simulated() -> AsyncIterator[str]:
    """The URL of a simulated replica of the same size."""
    async with serving(SimSettings(num_gpu_blocks=BLOCKS, speed=SPEED, events=False)) as port:
        yield f"http://127.0.0.1:{port}"


async def answers(url: str) -> list[Any]:
    """The status and the documents of each answer, but for the time of its creation."""
    found: list[Any] = []
    async with httpx.AsyncClient() as http:
        for number, (path, body) in enumerate(REQUESTS):
            answer = await http.post(url + path, json=body, headers={"x-request-id": f"request-{number}"})
            lines = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")
            documents = [json.loads(line) for line in lines if line]
            found.append((answer.status_code, [{**each, "created": 0} for each in documents]))
    return found


async def test_a_light_replica_gives_the_answers_and_the_cache_hits_of_the_simulated_one(
    light: str, simulated: str
) -> None:
    ours, theirs = await answers(light), await answers(simulated)
    for request, one, other in zip(REQUESTS, ours, theirs, strict=True):
        if one[0] == 200:
            assert one == other, request
        else:  # with fewer words
            assert one[0] == other[0]
            assert one[1][0]["error"].keys() == other[1][0]["error"].keys()
    hits = [(documents[-1].get("usage") or {}).get("prompt_tokens_details") for _, documents in ours]
    assert hits[0] is None
    assert hits[1] == {"cached_tokens": 160}
    assert 0 < hits[4]["cached_tokens"] < 160


SMALL = ("--gateways", "2", "--sessions-per-s", "10", "--pace", "20")
"""At this pace, answers take a second. If a busy machine adds some of its own, workers are not much busier for it."""


def rows_of(out: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that a run writes."""
    command = [sys.executable, "-m", "bench.fleet", *SMALL, *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_follow_ups_find_through_any_gateway_what_one_endless_cache_would_find(tmp_path: Path) -> None:
    ours, at_random = rows_of(tmp_path / "fleet.json", "--workers", "12", "--sessions-per-worker", "5")
    assert (ours["system"], at_random["system"]) == ("prefix_kv_aware", "random worker")
    for row in (ours, at_random):
        assert (row["sessions"], row["errors"]) == (60, 0)
        assert row["requests"] == 60 + row["follow_ups"] > 60
        assert row["cached"] <= row["bound"]
    assert ours["follow_up_cached"] > 0.9 * ours["follow_up_bound"] > 0.8
    assert at_random["same_worker"] < 0.5 < ours["same_worker"]
    assert min(ours[f"{part}_us"] for part in ("gateways", "redis", "replicas", "clients")) > 0
    assert at_random["gateways_us"] == 0
