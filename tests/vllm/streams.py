"""Streams that are open while a replica stops or restarts, and a check that it is ready again."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx

from bench.vllm.install import MODEL
from bench.vllm.replicas import VllmReplica
from tests.cluster.clients import HeldStream, held_stream
from tests.vllm.clients import Client
from tests.vllm.workload import text

_MAX_STREAMS = 4
_TOKENS = 800  # about ten seconds


async def streams_up_to_one_of(victim: VllmReplica, stack: AsyncExitStack, gateways: list[Client]) -> list[HeldStream]:
    """Open long streams on both replicas in turn until one is on the victim. That stream has only just begun."""
    turns = httpx.AsyncClient(timeout=120, headers={"x-kvgate-policy": "round_robin"})
    http = await stack.enter_async_context(turns)
    streams: list[HeldStream] = []
    for number in range(_MAX_STREAMS):
        prompt, url = text(f"long stream {number}", 1500), gateways[number % 2].url
        opened = held_stream(http, url, prompt, _TOKENS, model=MODEL, ignore_eos=True)
        streams.append(await stack.enter_async_context(opened))
        if streams[-1].replica == victim.id:
            return streams
    raise AssertionError(f"{victim.id} was given none of {_MAX_STREAMS} streams")


async def is_ready(replica: VllmReplica, gateways: list[Client]) -> bool:
    return all([replica.id in await gateway.ready_replicas() for gateway in gateways])
