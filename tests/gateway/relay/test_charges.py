"""What a request is charged, however its answer ends: what the engine generated for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.placement import Used
from gateway.relay.charges import generated_tokens
from gateway.routing.ticket import Ticket
from tests.gateway.scripted import CHAT, Relayed, chunk, head, whole
from tests.polling import eventually

STREAM = head("content-type: text/event-stream", "transfer-encoding: chunked")
FAST, SLOW = 1e9, 1e-9
"""Tokens per second of engines that reach any limit at once, or none."""
OUTPUT_WEIGHT = 2
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
OPENING_OF_TWO = OPENING + OPENING.replace(b'"index":0', b'"index":1')
DONE = b"data: [DONE]\n\n"


def said(content: str, index: int = 0, more: str = "") -> bytes:
    return f'data: {{"choices":[{{"index":{index},"delta":{{"content":"{content}"}}}}]{more}}}\n\n'.encode()


def running(tokens: int, index: int) -> bytes:
    return said("a", index, f',"usage":{{"prompt_tokens":5,"completion_tokens":{tokens}}}')


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Ticket, Used | None]]:
    """What each ticket was settled with first, as Redis is told."""
    settled: dict[str, Used | None] = {}
    done = Ticket.done

    def noted(ticket: Ticket) -> None:
        settled.setdefault(ticket.request.reservation, ticket.used)
        done(ticket)

    monkeypatch.setattr(Ticket, "done", noted)
    return settled


def output_tokens(charged: dict[str, Used | None]) -> list[int | None]:
    """The tokens of answers in what was charged, which counts them with a weight."""
    return [used and used.charge_tokens - used.limit_tokens for used in charged.values()]


def paces(relayed: Relayed, tokens_per_s: float) -> None:
    relayed.gateway.fleet.members["r0"].tokens_per_s = tokens_per_s


async def left(relayed: Relayed, path: str, received: bytes, **body: Any) -> None:
    """A client asks, receives some bytes, and leaves."""
    async with relayed.http.stream("POST", path, json={"model": "m", **body}) as answer:
        async for piece in answer.aiter_raw():
            received = received[len(piece) :]
            if not received:
                break


MESSAGES = [{"role": "user", "content": "Hello"}]
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n'
ITEM = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "events", "tokens"),
    [
        (CHAT, {"messages": MESSAGES}, OPENING + said("a") + said("b"), 2),
        (CHAT, {"messages": MESSAGES}, OPENING + said('the key \\"delta\\": and \\"delta\\":'), 1),
        (CHAT, {"messages": MESSAGES, "n": 2}, OPENING_OF_TWO + 30 * (said("a") + said("b", 1)), 60),
        (CHAT, {"messages": MESSAGES, "n": 2}, OPENING_OF_TWO + running(7, 0) + running(9, 1) + running(8, 0), 17),
        ("/v1/completions", {"prompt": ["x", "y"]}, 5 * b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', 5),
        ("/v1/completions", {"prompt": "x", "n": 2}, b'data: {"choices":[{"text":"a"},{"text":"b"}]}\n\n', 2),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, 3 * DELTA, 3),
        ("/v1/responses", {"input": "x"}, 4 * ITEM, 4),
    ],
    ids=["chat", "quoted", "n", "running usage", "prompts", "choices of one event", "messages", "responses"],
)
async def test_a_stream_whose_client_leaves_is_charged_by_its_tokens_however_many_come_in_a_piece(
    relayed: Relayed, charged: dict[str, Used | None], path: str, body: dict[str, Any], events: bytes, tokens: int
) -> None:
    paces(relayed, SLOW)
    relayed.replica.says(STREAM, chunk(events), asyncio.Event())
    await left(relayed, path, events, stream=True, **body)
    await eventually(lambda: charged)
    assert output_tokens(charged) == [tokens]


async def test_a_whole_answer_whose_client_leaves_is_charged_what_the_engine_made_within_its_own_limit(
    relayed: Relayed, charged: dict[str, Used | None]
) -> None:
    relayed.replica.says(asyncio.Event())
    for pace, tokens in ((FAST, 300), (SLOW, 0)):
        paces(relayed, pace)
        asked = asyncio.ensure_future(relayed.ask(max_completion_tokens=300, max_tokens=1))
        await eventually(lambda: relayed.gateway.moves.waiting)
        asked.cancel()
        await eventually(lambda: charged)
        assert output_tokens(charged) == [tokens]
        charged.clear()


async def test_a_stream_that_shows_fewer_parts_than_were_made_is_charged_by_its_time(
    relayed: Relayed, charged: dict[str, Used | None]
) -> None:
    paces(relayed, FAST)
    relayed.replica.says(STREAM, chunk(OPENING + said("many tokens")), asyncio.Event())
    await left(relayed, CHAT, OPENING + said("many tokens"), stream=True, messages=MESSAGES, max_tokens=300)
    await eventually(lambda: charged)
    assert output_tokens(charged) == [300]


async def test_of_a_stream_that_its_replica_breaks_off_only_what_was_seen_is_charged(
    relayed: Relayed, charged: dict[str, Used | None]
) -> None:
    paces(relayed, FAST)
    relayed.replica.says(STREAM, chunk(OPENING + said("a")))
    assert "stream_broken" in (await relayed.stream()).text
    assert output_tokens(charged) == [1]


@pytest.mark.parametrize("relayed", [{"timeouts": {"first_byte_s": 0.1, "request_s": 0.2}}], indirect=True)
async def test_an_answer_whose_time_is_over_is_charged_and_an_attempt_that_failed_is_not(
    relayed: Relayed, charged: dict[str, Used | None]
) -> None:
    paces(relayed, FAST)
    relayed.replica.says(asyncio.Event())
    assert (await relayed.ask(max_tokens=300)).status_code == 504
    assert output_tokens(charged) == [300]
    charged.clear()
    assert (await relayed.stream()).status_code == 502
    assert output_tokens(charged) == [0]


@pytest.mark.parametrize(
    ("path", "answer", "tokens"),
    [
        ("/v1/chat/completions/batch", whole(b'{"usage":{"prompt_tokens":9,"completion_tokens":40}}'), 40),
        ("/v1/chat/completions/batch", whole(b'{"choices":[]}'), 120),
        (CHAT, whole(b'{"choices":[]}'), 60),
        (CHAT, whole(b'{"error":{}}', status=400), 0),
        (CHAT, STREAM + chunk(OPENING + said("a") + DONE) + chunk(b""), 60),
        ("/v1/embeddings", whole(b"{}"), 0),
        ("/v1/nobody/knows", whole(b"{}"), 0),
    ],
)
async def test_an_answer_without_usage_is_charged_by_its_time_and_others_as_they_say(
    relayed: Relayed, charged: dict[str, Used | None], path: str, answer: bytes, tokens: int
) -> None:
    paces(relayed, FAST)
    relayed.replica.says(answer)
    body = {"model": "m", "messages": [MESSAGES, MESSAGES] if path.endswith("batch") else MESSAGES, "input": "x"}
    await relayed.http.post(path, json=body | {"max_tokens": 60})
    assert output_tokens(charged) == [tokens]


async def test_what_the_engines_cache_served_costs_nothing(relayed: Relayed, charged: dict[str, Used | None]) -> None:
    usage = b'{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":6}}}'
    relayed.replica.says(whole(usage))
    await relayed.ask()
    assert [used and used.limit_tokens for used in charged.values()] == [9 - 6 + 4]


@pytest.mark.parametrize(
    ("seen", "by_pace", "limit", "tokens"),
    [(100, 140, None, 100), (100, 160, None, 160), (100, 160, 120, 120), (100, 500, 50, 100), (0, 7, None, 7)],
)
def test_it_is_never_less_than_was_seen_and_never_more_than_its_limit(
    seen: int, by_pace: int, limit: int | None, tokens: int
) -> None:
    assert generated_tokens(seen, by_pace, limit) == tokens
