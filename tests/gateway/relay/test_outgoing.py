"""The headers of one attempt. Those of the request stay as they were read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.prompt import Prompt
from gateway.relay.outgoing import Outgoing, headers_of
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from tests.gateway.routing.test_router import REPLICAS, job, lonely_router

HeadersOf = Callable[[Job], dict[str, str]]


@pytest.fixture
async def headers() -> HeadersOf:
    """Of an attempt at a replica."""
    router = lonely_router()
    ticket = await router.place(job(b"a" * 16), (), list, None, is_new=True)
    assert ticket is not None
    outgoing = Outgoing(router._fleet, router._tenants)
    return lambda asked: outgoing.headers(asked, ticket)


async def test_a_request_is_named_by_its_chain_at_the_backend_that_it_goes_to(headers: HeadersOf) -> None:
    asked = job(b"a" * 16)
    chain_there = Prompt("m", ["1" * 32], [400], [0], [], b"a" * 16, False)
    asked.route.chains = {"there": (chain_there, [90])}
    here, there, unread = (ServedModel(pool, pool, None, dict.fromkeys(REPLICAS, "")) for pool in ("m", "there", "x"))
    told = []
    for backend in (here, there, unread):
        asked.route.aim(backend)
        told.append(headers(asked).get("x-session-id"))
    assert told == ["0" * 32, "1" * 32, None]
    assert asked.headers == {}


async def test_nothing_names_a_batch_or_the_rest_of_a_stream(headers: HeadersOf) -> None:
    asked = job(b"a" * 16)
    assert headers(asked) == {"x-session-id": "0" * 32}
    assert headers(asked._replace(is_batch=True)) == {}
    assert headers(asked._replace(route=asked.route.for_rest())) == {}


async def test_a_span_of_the_gateway_takes_the_place_of_all_that_the_client_says_of_its_trace() -> None:
    of_client = {"traceparent": "the client's", "tracestate": "a=b"}
    asked = job(b"a" * 16)._replace(headers=of_client)
    assert headers_of(asked) == of_client
    asked.route.traced({"traceparent": "the gateway's"})
    assert headers_of(asked) == {"traceparent": "the gateway's"}
    assert asked.headers == {"traceparent": "the client's", "tracestate": "a=b"}
