"""A ticket gives back its attempt's load and claims, in whatever order the attempt's endings arrive."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis.asyncio as redis

import coordinator.pool.claims
from coordinator.placement import Placement, Prefill
from coordinator.pool.pool import Pool
from coordinator.subset import Subset
from gateway.routing.ticket import Ticket
from tests.coordinator.stage import KEYS, chain, drained, joined, numbers, owners, register, request
from tests.coordinator.stream import followed
from tests.redis_server import RedisServer, running_redis

EVENTS = ("computed", "first_token", "ended", "done")
PROMPT = chain("a prompt", "of two keys")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_server.url, decode_responses=True, protocol=2)
    yield client
    await client.flushdb()
    await client.aclose()


@pytest.fixture
async def pool(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    async with joined(redis_server.url) as pool:
        await register(pool, 2)
        yield pool


async def placed(pool: Pool, reservation: str, prompt: Sequence[str] = PROMPT) -> Ticket:
    asked = request(reservation, prompt, pinned="r0")
    placement = await pool.place(asked)
    assert placement is not None
    return Ticket(pool, asked, "r0", placement.incarnation, "http://r0", placement.why, 0, placement)


async def claims(client: redis.Redis) -> list[bool]:
    return [bool(await owners(client, key)) for key in PROMPT]


@pytest.mark.parametrize("told", [*itertools.permutations(EVENTS), ("ended", "ended", "done", "done"), ("done",)])
async def test_every_order_of_endings_gives_the_load_back_once_and_claims_unless_they_are_true(
    pool: Pool, client: redis.Redis, told: tuple[str, ...]
) -> None:
    other = await placed(pool, "another", chain("another prompt"))
    other.first_token()
    ticket = await placed(pool, "this")
    for event in (*told, *told):
        getattr(ticket, event)()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {}
    first = next((event for event in told if event in ("ended", "computed", "first_token")), "")
    assert await claims(client) == 2 * [first != "ended"]
    other.done()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {}


async def test_a_pair_that_is_given_up_before_anything_was_sent_holds_nothing_at_either_end(
    pool: Pool, client: redis.Redis
) -> None:
    asked = request("pair", PROMPT)
    asked.serving, asked.prefill = Subset.of(["r0"]), Prefill(Subset.of(["r1"]), 1)
    placement = await pool.place(asked)
    assert isinstance(placement, Placement)
    assert placement.prefill is not None
    ticket = Ticket(pool, asked, "r0", placement.incarnation, "http://r0", placement.why, 0, placement)
    ticket.prefill = Ticket(pool, asked.of_prefill(), "r1", "life1", "http://r1", "cold", 0, placement.prefill)
    ticket.ended()
    ticket.done()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {}
    assert await numbers(client, KEYS.backlog_tokens) == {}
    assert await claims(client) == [False, False]


async def test_an_attempt_that_computed_nothing_takes_its_claims_back_and_one_that_did_keeps_them(
    pool: Pool, client: redis.Redis
) -> None:
    failed = await placed(pool, "failed")
    assert await claims(client) == [True, True]
    failed.ended()
    failed.done()
    await drained(pool)
    assert await claims(client) == [False, False]

    computed = await placed(pool, "computed")
    computed.first_token()
    await drained(pool)
    assert (await numbers(client, KEYS.active), await numbers(client, KEYS.backlog_tokens)) == ({"r0": 1}, {})
    computed.ended()
    computed.done()
    await drained(pool)
    assert await claims(client) == [True, True]
    assert await numbers(client, KEYS.active) == {}


async def test_what_a_broken_stream_claimed_has_to_be_confirmed_although_the_next_placement_gives_its_load_back(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.pool.claims, "CONFIRM_S", 0.0)
    await followed(client)
    broken = await placed(pool, "broken")
    broken.first_token()
    broken.ended()
    assert await pool.place(request("rest", PROMPT, pinned="r1", release="broken")) is not None
    await pool.beat()
    await drained(pool)
    assert [set(await owners(client, key)) for key in PROMPT] == [{"r1"}, {"r1"}], "no event has told of r0"


async def test_without_the_store_a_ticket_gives_back_what_it_counts_here() -> None:
    pool = Pool("m", "gw0", 1.0)
    ticket = Ticket(pool, request("one", PROMPT), "r0", "life1", "http://r0", "fallback", 0, None)
    for event in EVENTS:
        getattr(ticket, event)()
    assert pool.live == {}
