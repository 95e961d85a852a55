"""An engine may abort an answer, or fail, although its server ends the answer as if it were complete. Before the first
byte another replica is asked; after it the client is told."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.gateway.relay.conftest import Pair
from tests.gateway.scripted import ASKED, CHAT, Relayed, chunk, head, whole
from tests.polling import eventually

EVENTS = ("content-type: text/event-stream", "transfer-encoding: chunked")
DONE = b"data: [DONE]\n\n"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
ANY = {**ASKED, "input": "Hello", "prompt": "Hello"}
"""A request that every path accepts."""
FAILED = {"error": {"message": "dead", "type": "InternalServerError", "code": 500}}


LONG = b'"' + b"a" * 2**16 + b'"'
"""A text with which an answer is large."""


def event(document: dict[str, Any], name: str = "") -> bytes:
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: " + orjson.dumps(document) + b"\n\n"


def part(delta: dict[str, Any], reason: str | None = None, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": reason}]})


ROLE, TOKEN = part({"role": "assistant", "content": ""}), part({"content": "Hi"})
START = event({"type": "message_start", "message": {"stop_reason": None}}, "message_start")
TEXT = event({"type": "content_block_delta", "delta": {"text": "Hi"}}, "content_block_delta")
NO_STOP = event({"type": "message_delta", "delta": {"stop_reason": None}}, "message_delta")
STOP = event({"type": "message_stop"}, "message_stop")
CREATED = event({"type": "response.created", "response": {"status": "in_progress", "error": None}}, "response.created")
INSTRUCTIONS = b'"status"', b'"instructions":' + LONG + b',"status"'
IN_PROGRESS = CREATED.replace(b"created", b"in_progress")
OUTPUT = event({"type": "response.output_text.delta", "delta": "Hi"}, "response.output_text.delta")
COMPLETED = event({"type": "response.completed", "response": {"status": "completed"}}, "response.completed")
CANCELLED = event({"type": "response.completed", "response": {"status": "cancelled"}}, "response.completed")


def aborted(reason: str = "abort") -> bytes:
    stop = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
    return orjson.dumps({"choices": [stop, {**stop, "finish_reason": reason}]})


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, aborted(), "aborted"),
        (CHAT, aborted().replace(b'"a"', LONG), "aborted"),
        ("/v1/completions", aborted("error"), "aborted"),
        (CHAT, orjson.dumps(FAILED), "error_event"),
        (CHAT, orjson.dumps({"object": "error", "message": "dead", "code": 500}), "error_event"),
        (MESSAGES, b'{"type":"message","content":[],"stop_reason":null}', "aborted"),
        (RESPONSES, b'{"object":"response","status":"cancelled","output":[{}]}', "aborted"),
        (EMBEDDINGS, b'{"object":"list","data":[{"object":"embedding","embedding":[]}]}', "aborted"),
        ("/v1/audio/transcriptions", orjson.dumps(FAILED), "error_event"),
        (CHAT, b'{"error":{"code":500,"message":%b}}' % LONG, "error_event"),
        (MESSAGES, b'{"type":"message","content":[%b],"stop_reason":null}' % LONG, "aborted"),
        (RESPONSES, b'{"object":"response","status":"cancelled","output":[%b]}' % LONG, "aborted"),
        (EMBEDDINGS, b'{"object":"list","model":%b,"data":[{"object":"embedding","embedding": []}]}' % LONG, "aborted"),
    ],
)
async def test_a_whole_answer_that_is_not_finished_is_asked_of_another_replica(
    pair: Pair, path: str, body: bytes, reason: str
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(body if pair.asked == 1 else b'{"choices":[]}'))

    for replica in pair.replicas:
        replica.answer = answer
    got = await pair.http.post(path, json=ANY)
    assert (got.status_code, got.content, pair.asked) == (200, b'{"choices":[]}', 2)
    metrics = (await pair.http.get("/metrics")).text
    assert f'kvgate_retries_total{{reason="{reason}"}} 1.0' in metrics


async def test_a_large_answer_is_complete_although_its_metadata_look_like_a_reason(pair: Pair) -> None:
    body = b'{"object":"response","status":"completed","metadata":{"finish_reason":"error"},"output":[%b]}' % LONG

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(body))

    for replica in pair.replicas:
        replica.answer = answer
    got = await pair.http.post(RESPONSES, json=ANY)
    assert (got.status_code, got.content, pair.asked) == (200, body, 1)


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        (CHAT, [ROLE, part({}, "abort"), DONE]),
        (CHAT, [ROLE + part({"role": "assistant"}, index=1), part({}, "abort", index=1)]),
        (CHAT, [ROLE, event(FAILED), DONE]),
        ("/v1/completions", [part({}, "abort") + DONE]),
        (MESSAGES, [START, NO_STOP, STOP]),
        (MESSAGES, [START, event({"type": "error", "error": {"type": "api_error"}}, "error")]),
        (RESPONSES, [CREATED, IN_PROGRESS, CANCELLED]),
        (RESPONSES, [CREATED.replace(*INSTRUCTIONS) + IN_PROGRESS.replace(*INSTRUCTIONS), CANCELLED]),
        (RESPONSES, [CREATED + IN_PROGRESS, event({"type": "error", "error": FAILED["error"]}, "error")]),
        ("/v1/audio/transcriptions", [part({"content": ""}, "abort"), DONE]),
    ],
)
async def test_a_stream_that_was_aborted_before_its_first_token_is_asked_of_another_replica(
    pair: Pair, path: str, pieces: list[bytes]
) -> None:
    """vLLM announces the answer first, and these bytes come alone."""
    good = {MESSAGES: TEXT + STOP, RESPONSES: OUTPUT + COMPLETED}.get(path, TOKEN + DONE)

    async def answer(writer: asyncio.StreamWriter) -> None:
        if pair.asked > 1:
            writer.write(head(*EVENTS) + chunk(good) + chunk(b""))
            return
        writer.write(head(*EVENTS))
        for piece in pieces:
            writer.write(chunk(piece))
            await asyncio.sleep(0.01)  # so that it comes alone
        writer.write(chunk(b""))

    for replica in pair.replicas:
        replica.answer = answer
    got = await pair.http.post(path, json={**ANY, "stream": True})
    assert (got.status_code, got.content, pair.asked) == (200, good, 2)


@pytest.mark.parametrize(
    ("path", "passed", "rest"),
    [
        (CHAT, ROLE + TOKEN, part({}, "abort") + DONE),
        (CHAT, ROLE + TOKEN, TOKEN.replace(b'"finish_reason":null', b'"finish_reason": "error"') + DONE),
        (CHAT, TOKEN + part({"content": "a"}, "stop"), part({}, "abort", index=1) + TOKEN + DONE),
        (CHAT, TOKEN, event(FAILED) + DONE),
        (MESSAGES, START + TEXT, NO_STOP + STOP),
        (MESSAGES, START + TEXT, event({"type": "error", "error": {"type": "overloaded_error"}}, "error")),
        (RESPONSES, CREATED + OUTPUT, CANCELLED),
        (RESPONSES, CREATED + OUTPUT, event({"type": "error", "code": "server_error", "message": "dead"}, "error")),
        ("/v1/audio/translations", TOKEN, part({}, "abort") + DONE),
    ],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["with the end", "before the end"])
async def test_a_stream_that_is_not_finished_ends_as_broken_once(
    relayed: Relayed, path: str, passed: bytes, rest: bytes, at_once: bool
) -> None:
    got_first, sent = asyncio.Event(), [chunk(rest) + chunk(b"")] if at_once else [chunk(rest), asyncio.Event()]
    relayed.replica.says(head(*EVENTS), chunk(passed), got_first, *sent)
    async with relayed.http.stream("POST", path, json={**ANY, "stream": True}) as answer:
        pieces = answer.aiter_bytes()
        got = await anext(pieces)
        got_first.set()
        async for piece in pieces:
            got += piece
    assert got.startswith(passed)
    last = got[len(passed) :]
    assert (last.count(b"data:"), b"stream_broken" in last, b"[DONE]" in last) == (1, True, False)
    assert "kvgate_broken_streams_total 1.0" in relayed.gateway.metrics.exposition().decode()
    await eventually(lambda: not relayed.gateway.upstream._origins[relayed.replica.url]._open)


async def test_an_error_that_is_the_requests_fault_passes_as_it_is_and_is_the_end(pair: Pair) -> None:
    refused = event({"type": "error", "code": "context_length_exceeded", "message": "too long"}, "error")
    pair.say(head(*EVENTS) + chunk(CREATED + refused) + chunk(b""))
    answer = await pair.http.post(RESPONSES, json={"model": "m", "input": "Hello", "stream": True})
    assert (answer.content, pair.asked) == (CREATED + refused, 1)
    body = orjson.dumps({"error": {"message": "too long", "code": 400}})
    pair.say(whole(body))
    assert ((await pair.http.post(CHAT, json=ASKED)).content, pair.asked) == (body, 2)
    assert "kvgate_broken_streams_total 0.0" in (await pair.http.get("/metrics")).text


async def test_if_every_replica_aborts_the_client_is_told_and_no_replica_is_held_to_be_broken(pair: Pair) -> None:
    pair.say(whole(aborted()))
    for asked in range(1, 8):
        answer = await pair.http.post(CHAT, json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "answer_aborted")
        assert pair.asked == 2 * asked
    pair.say(whole(b"{}"))
    assert "last_resort" not in (await pair.http.post(CHAT, json=ASKED)).headers["x-kvgate-decision"]


async def test_an_aborted_response_with_effects_is_passed_on_because_nobody_may_ask_for_it_again(pair: Pair) -> None:
    body = b'{"object":"response","id":"resp_1","status":"cancelled","output":[{}]}'
    pair.say(whole(body))
    answer = await pair.http.post(RESPONSES, json={"model": "m", "input": "Hello", "store": True})
    assert (answer.status_code, answer.content, pair.asked) == (200, body, 1)


async def test_a_response_that_its_client_cancelled_ends_as_it_is(pair: Pair) -> None:
    cancelled = event({"type": "response.cancelled", "response": {"status": "cancelled"}}, "response.cancelled")
    pair.say(head(*EVENTS) + chunk(CREATED + cancelled) + chunk(b""))
    asked = {"model": "m", "input": "Hello", "background": True, "stream": True}
    assert (await pair.http.post(RESPONSES, json=asked)).content == CREATED + cancelled


@pytest.mark.parametrize("at", [0, 2**21 - 10, 2**22])
async def test_a_large_answer_that_was_aborted_is_cut(relayed: Relayed, at: int) -> None:
    body, go_on = b"x" * at + b'"finish_reason": "abort"' + b"x" * (2**22 - at), asyncio.Event()
    relayed.replica.says(head(f"content-length: {len(body)}"), body[: 2**21], go_on, body[2**21 :])
    with pytest.raises(httpx.TransportError):
        await read_half(relayed, go_on)
    assert "kvgate_broken_streams_total 1.0" in relayed.gateway.metrics.exposition().decode()


async def read_half(relayed: Relayed, go_on: asyncio.Event) -> None:
    """Reads an answer. Its second half is sent when the first one is here, so that it comes in another piece."""
    got = 0
    async with relayed.http.stream("POST", CHAT, json=ASKED) as answer:
        async for piece in answer.aiter_raw():
            got += len(piece)
            if got >= 2**21:
                go_on.set()
