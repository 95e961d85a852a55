"""Clients of a cluster with real engines. They compare the prediction for a request with its engine's usage."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from bench.vllm.install import MODEL
from bench.vllm.replicas import BLOCK_TOKENS
from gateway.tasks import Tasks
from tests.polling import eventually
from tests.vllm.workload import Ask, Messages, Workload

CHAT = "/v1/chat/completions"
BROKEN = "stream_broken"
CLIENTS = 4
"""The number of clients of a busy crowd."""
_ANSWER_TOKENS = 100
_NOT_SAID = -1


@dataclass(frozen=True)
class Reply:
    """A whole answer, with the tokens that the gateway predicted and those in the engine's usage."""

    status: int
    text: str
    error: str
    """The code of the error in the answer or at its stream's end; empty if the answer is complete."""
    replica: str
    decision: str
    matched_tokens: int
    next_boundary_tokens: int
    """The first boundary that is not matched. The gateway would have predicted it if it knew that it was cached."""
    prompt_tokens: int
    cached_tokens: int

    @property
    def state(self) -> str:
        return self.decision.rpartition("state=")[2]

    @property
    def error_blocks(self) -> int:
        """How many more blocks were cached than predicted; negative if fewer."""
        return self.cached_tokens // BLOCK_TOKENS - self.matched_tokens // BLOCK_TOKENS

    @property
    def lacked(self) -> bool:
        """Whether fewer tokens were cached than predicted."""
        return self.cached_tokens < self.matched_tokens - BLOCK_TOKENS

    @property
    def exceeded(self) -> bool:
        """Whether a boundary was cached although it was not matched."""
        return self.cached_tokens > self.next_boundary_tokens + BLOCK_TOKENS

    @property
    def is_as_predicted(self) -> bool:
        return not self.lacked and not self.exceeded


class Client:
    """Sends requests to one gateway."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self.url = url

    async def ask(self, messages: Messages, **fields: Any) -> Reply:
        """Sends a chat request that must get a whole answer. `policy` goes into the policy header."""
        reply = await self.send(messages, **fields)
        assert (reply.status, reply.error) == (200, ""), reply
        return reply

    async def send(self, messages: Messages, stream: bool = False, max_tokens: int = 8, **fields: Any) -> Reply:
        """Sends a chat request that may fail. Raises httpx.TransportError if there is no answer."""
        body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        headers = {"x-kvgate-policy": body.pop("policy")} if "policy" in body else {}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return reply_of(await self._http.post(self.url + CHAT, json=body, headers=headers))

    async def explain(self, messages: Messages) -> Any:
        """The decision for a request, without placing it."""
        answer = await self._http.post(f"{self.url}/v1/route/explain", json={"model": MODEL, "messages": messages})
        return answer.raise_for_status().json()

    async def until_found(self, messages: Messages, served: Reply) -> None:
        """Wait until this gateway knows from the engine's events that the replica of this answer holds the prompt."""

        async def is_found() -> bool:
            explained = await self.explain(messages)
            owners = explained["chain"][-1]["owners"]
            known = [one["replica"] for one in owners if one["kind"] == "resident" and not one["stale"]]
            choice = explained["choice"]
            # An engine publishes a prompt chunk by chunk: at first the map knows only some of its tokens.
            is_whole = choice["matched_tokens"] >= served.prompt_tokens - BLOCK_TOKENS
            return served.replica in known and choice["replica"] == served.replica and is_whole

        await eventually(is_found, within_s=5)

    async def ready_replicas(self) -> list[str]:
        answer = await self._http.get(f"{self.url}/ready")
        replicas: list[str] = answer.json().get("replicas", [])
        return replicas


def reply_of(response: httpx.Response) -> Reply:
    """Reads a plain or streamed answer of a gateway or a replica. Raises if it is neither an answer nor an error."""
    events = _events(response)
    error = next((event["error"] for event in events if event.get("error")), None)
    usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    headers = response.headers
    if error is None and response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), f"a stream just ended: {response.text[-200:]!r}"
    return Reply(
        status=response.status_code,
        text="".join(_said(event) for event in events),
        error="" if error is None else str(error.get("code") or error.get("message")),
        replica=headers.get("x-kvgate-replica", ""),
        decision=headers.get("x-kvgate-decision", ""),
        matched_tokens=int(headers.get("x-kvgate-matched-tokens", _NOT_SAID)),
        next_boundary_tokens=int(headers.get("x-kvgate-next-boundary-tokens", _NOT_SAID)),
        prompt_tokens=usage.get("prompt_tokens", _NOT_SAID),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", _NOT_SAID),
    )


def _events(response: httpx.Response) -> list[Any]:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    return [orjson.loads(found) for found in re.findall(r"^data: (\{.*)$", response.text, re.MULTILINE)]


def _said(event: Any) -> str:
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


class Crowd:
    """Clients that send one workload together, each request through the next gateway in turn."""

    def __init__(self, gateways: Sequence[Client], workload: Workload, max_tokens: int = 8) -> None:
        self._gateways = gateways
        self._workload = workload
        self._max_tokens = max_tokens
        self._sent = 0
        self.replies: list[tuple[Ask, Reply]] = []
        self.failures: list[str] = []
        """Requests without any answer because their connection broke."""

    async def run(self, clients: int, goes_on: Callable[[int], bool]) -> None:
        """Send requests while `goes_on` of the number of sent requests is true. Returns after the last answer."""
        tasks = Tasks()
        try:
            await asyncio.gather(*(tasks.spawn(self._client(goes_on), f"client {n}") for n in range(clients)))
        finally:
            await tasks.close()

    async def _client(self, goes_on: Callable[[int], bool]) -> None:
        while goes_on(self._sent):
            number = self._sent
            self._sent += 1
            gateway = self._gateways[number % len(self._gateways)]
            await self._request(gateway, self._workload.next(), stream=number % 4 == 3)
            if number % 50 == 49:
                print(f"  {number + 1} requests sent", flush=True)

    async def _request(self, gateway: Client, ask: Ask, stream: bool) -> None:
        try:
            reply = await gateway.send(ask.messages, stream=stream, max_tokens=self._max_tokens)
        except httpx.TransportError as error:
            self.failures.append(f"{ask.subject} through {gateway.url}: {error!r}")
            self._workload.failed(ask)
            return
        self.replies.append((ask, reply))
        if reply.error:
            self._workload.failed(ask)
        else:
            self._workload.answered(ask, reply.text)


@asynccontextmanager
async def busy_crowd(gateways: Sequence[Client], seed: int) -> AsyncIterator[Crowd]:
    """CLIENTS clients that send requests without a pause. Enters after some answers, and leaves after the last."""
    crowd, is_over = Crowd(gateways, Workload(seed=seed), _ANSWER_TOKENS), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(crowd.run(CLIENTS, lambda _: not is_over.is_set()))
        try:
            await eventually(lambda: len(crowd.replies) > 30, within_s=60)
            yield crowd
        finally:
            is_over.set()


def distribution(title: str, replies: Iterable[Reply]) -> str:
    """The errors of predictions in blocks, as lines to print."""
    replies = list(replies)
    errors = sorted(reply.error_blocks for reply in replies)
    if not errors:
        return f"{title}: none"
    points = {"min": 0.0, "p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    shown = ", ".join(f"{name} {errors[round(at * (len(errors) - 1))]:+d}" for name, at in points.items())
    exact = sum(error == 0 for error in errors) / len(errors)
    as_predicted = sum(reply.is_as_predicted for reply in replies) / len(replies)
    lacked, exceeded = sum(reply.lacked for reply in replies), sum(reply.exceeded for reply in replies)
    return (
        f"{title}: {len(errors)} placements, {as_predicted:.1%} as predicted ({lacked} lacked, {exceeded} exceeded)\n"
        f"  cached - matched in blocks: {shown}; exactly 0: {exact:.1%}"
    )
