"""An engine is killed in the middle of greedy streams. Each of them goes on, and is what it would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest

from bench.vllm.install import MODEL
from bench.vllm.replicas import VllmCluster, VllmReplica
from tests.gateway.simulator.pictures import image_part
from tests.polling import eventually
from tests.vllm.clients import Client
from tests.vllm.streams import is_ready
from tests.vllm.workload import text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STREAMS = 200
AT_ONCE = 32
TOKENS = 160
PATHS = ("/v1/chat/completions", "/v1/completions")
NAMED_PATHS = ("/v1/messages", "/v1/responses")
RESUMED, BY_TEXT = ": x-kvgate-resumed: ", ": x-kvgate-resumed: 1; text"


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions. Every fourth one has stop strings, which the model may come upon; every fifth chat has an
    image."""
    found = []
    for number in range(STREAMS):
        prompt, path = text(f"resumed {number}", 60 + number % 90), PATHS[number % 2]
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"prompt": prompt} if path == PATHS[1] else {"messages": [{"role": "user", "content": prompt}]}
        if path == PATHS[0] and number % 5 == 0:
            body["messages"] = [{"role": "user", "content": [image_part(number), {"type": "text", "text": prompt}]}]
        found.append((path, body | ({"stop": ["zq@", "the end"]} if number % 4 == 3 else {})))
    return found


def named_requests() -> list[tuple[str, dict[str, Any]]]:
    """Messages and responses. Every fourth one has stop strings."""
    found = []
    for number in range(STREAMS // 2):
        prompt, path = text(f"named {number}", 60 + number % 90), NAMED_PATHS[number % 2]
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True}
        if path == NAMED_PATHS[0]:
            body |= {"max_tokens": TOKENS, "system": "Be brief.", "messages": [{"role": "user", "content": prompt}]}
        else:
            body |= {"max_output_tokens": TOKENS, "instructions": "Be brief.", "input": prompt}
        stops = {"stop_sequences" if path == NAMED_PATHS[0] else "stop": ["zq@", "the end"]}
        found.append((path, body | (stops if number % 4 > 1 else {})))
    return found


async def answers(
    http: httpx.AsyncClient,
    urls: Sequence[str],
    kill: asyncio.Event | None = None,
    asked: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[str]:
    """The streams of all requests as they came. `kill` is set when a third of the streams is over."""
    asked = asked or requests()
    turns, over = asyncio.Semaphore(AT_ONCE), 0

    async def stream(number: int, path: str, body: dict[str, Any]) -> str:
        nonlocal over
        async with turns:
            answer = await http.post(urls[number % len(urls)] + path, json=body)
        over += 1
        if kill is not None and over == len(asked) // 3:
            kill.set()
        return answer.text if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"

    return list(await asyncio.gather(*(stream(number, *each) for number, each in enumerate(asked))))


def said(answer: str) -> tuple[str, str | None, dict[str, Any]]:
    """Text, finish reason and usage of an answer, without what the cache had of it."""
    words, reason, usage = "", None, dict[str, Any]()
    for event in answer.split("\n\n"):
        if not event.startswith("data: {"):
            continue
        document = orjson.loads(event[6:])
        if "error" in document:
            return words, str(document["error"]), usage
        for choice in document["choices"]:
            words += choice.get("text") or choice.get("delta", {}).get("content") or ""
            reason = choice["finish_reason"] or reason
        usage = document.get("usage") or usage
    usage.pop("prompt_tokens_details", None)
    return words, reason, usage


async def test_streams_of_a_killed_engine_go_on_as_they_would_have(
    http: httpx.AsyncClient, gateways: list[Client], cluster: VllmCluster
) -> None:
    urls = [gateway.url for gateway in gateways]
    first, second = await answers(http, urls), await answers(http, urls)
    by_chance = {number for number in range(STREAMS) if said(first[number]) != said(second[number])}
    broken = await answers_of_a_killed_engine(http, gateways, cluster.replicas[0], requests())
    resumed = [number for number, each in enumerate(broken) if RESUMED in each]
    by_text = {number for number in resumed if BY_TEXT in broken[number]}
    other = {number for number in range(STREAMS) if said(broken[number]) != said(first[number])} - by_text
    print(f"\n{len(resumed)} of {STREAMS} streams went on elsewhere, {len(by_text)} of them in other tokens;", end=" ")
    print(f"{len(by_chance)} differ between two unbroken runs")
    for number in sorted(other - by_chance):
        print(number, requests()[number], "\n", said(first[number]), "\n", said(broken[number]))
    assert resumed
    assert all("image_url" in orjson.dumps(requests()[number]).decode() for number in by_text)
    assert all(each.count("data: [DONE]") == 1 for each in broken)
    assert other <= by_chance


async def answers_of_a_killed_engine(
    http: httpx.AsyncClient, gateways: list[Client], victim: VllmReplica, asked: Sequence[tuple[str, dict[str, Any]]]
) -> list[str]:
    """The streams of these requests. The victim dies when a third of them is over, and serves again afterwards."""
    kill = asyncio.Event()

    async def killed() -> None:
        await kill.wait()
        await asyncio.to_thread(victim.kill)

    try:
        broken, _ = await asyncio.gather(answers(http, [each.url for each in gateways], kill, asked), killed())
    finally:
        victim.start()
    await asyncio.to_thread(victim.wait_until_healthy)
    await eventually(lambda: is_ready(victim, gateways), within_s=60)
    return broken


def said_in_named_events(answer: str) -> tuple[str, Any, int, int]:
    """The text of a message or a response, why it ended, and its tokens. All that its events repeat must agree."""
    events = [
        orjson.loads(event.partition("\ndata: ")[2]) for event in answer.split("\n\n") if event.startswith("event")
    ]
    words, last = "", events[-1]
    for event in events:
        if isinstance(delta := event.get("delta"), dict):
            words += delta.get("text", "")
        elif isinstance(delta, str):
            words += delta
    if last["type"] == "message_stop":
        usage, reason = events[-2]["usage"], events[-2]["delta"]
        cached = sum(usage.get(f"cache_{name}_input_tokens", 0) for name in ("read", "creation"))
        return words, reason, usage["input_tokens"] + cached, usage["output_tokens"]
    response = last["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["content"][0]["text"] for item in response["output"]] == [words]
    (done,) = (event["text"] for event in events if event["type"] == "response.output_text.done")
    assert done == words
    return words, response["status"], response["usage"]["input_tokens"], response["usage"]["output_tokens"]


async def test_messages_and_responses_of_a_killed_engine_go_on(
    http: httpx.AsyncClient, gateways: list[Client], cluster: VllmCluster
) -> None:
    asked = named_requests()
    first = [said_in_named_events(each) for each in await answers(http, [each.url for each in gateways], asked=asked)]
    broken = await answers_of_a_killed_engine(http, gateways, cluster.replicas[1], asked)
    found = [said_in_named_events(each) for each in broken]
    resumed = [number for number, each in enumerate(broken) if BY_TEXT in each]
    same = sum(found[number] == first[number] for number in resumed)
    print(f"\n{len(resumed)} of {len(asked)} messages and responses went on elsewhere; {same} are what they were")
    assert resumed
    assert [each[2] for each in found] == [each[2] for each in first], "the tokens of the prompts"
    assert all(output_tokens <= TOKENS for *_, output_tokens in found)
