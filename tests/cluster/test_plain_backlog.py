"""Requests without a stream: their prompts leave the backlog when prefill ends, while their answers still decode."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import running_cluster
from tests.cluster.clients import ask, prose
from tests.cluster.conftest import CONFIG, REPLICA_ARGUMENTS
from tests.cluster.ledger import Ledger
from tests.polling import eventually

REQUESTS = 6


@pytest.mark.parametrize("events", [True, False], ids=["confirmed-by-events", "as-predicted"])
async def test_the_backlog_of_plain_requests_ends_with_their_prefill_and_not_with_their_answers(
    http: httpx.AsyncClient, events: bool
) -> None:
    with running_cluster(
        gateways=2, replicas=3, replica_arguments=REPLICA_ARGUMENTS, events=events, config=CONFIG
    ) as cluster:
        if not events:  # without events a gateway learns an engine's speed from answers
            for n, replica in enumerate(cluster.replicas):
                (await ask(http, replica.url, prose(f"warm {n}"))).raise_for_status()
        async with (
            redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
            asyncio.TaskGroup() as clients,
        ):
            ledger = Ledger(client, cluster.pool)
            urls = cluster.gateway_urls
            asked = [
                clients.create_task(hung_up(http, urls[n % 2], prose(f"long {n}", words=2000))) for n in range(REQUESTS)
            ]
            await eventually(lambda: all_placed(ledger))
            await eventually(lambda: only_decodes(ledger))
            assert not any(each.done() for each in asked)
            for each in asked:
                each.cancel()
            await eventually(lambda: is_drained(ledger))


async def hung_up(http: httpx.AsyncClient, url: str, text: str) -> None:
    """Sends a request whose answer takes longer than the test. The test cancels it."""
    with suppress(asyncio.CancelledError):
        await ask(http, url, text, max_tokens=4000)


async def all_placed(ledger: Ledger) -> bool:
    return (await ledger.sums()).total == REQUESTS


async def only_decodes(ledger: Ledger) -> bool:
    sums = await ledger.sums()
    assert not sums.problems(), sums.problems()
    assert sums.total == REQUESTS
    return set(sums.backlog_tokens) == {"r0", "r1", "r2"} and not any(sums.backlog_tokens.values())


async def is_drained(ledger: Ledger) -> bool:
    return (await ledger.sums()).are_zero
