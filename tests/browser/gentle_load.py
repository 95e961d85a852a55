"""A gentle load, so that the pictures have something to show: some clients ask, read the answer, and think.

Half of them hold conversations with one of a few system prompts, half ask about a few pictures. Each turn goes to the
next gateway.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import httpx
import orjson
from PIL import Image

from gateway.ops.local.demo import client, picture
from gateway.ops.local.state_dir import Cluster

_CLIENTS = 6
_TURNS, _ANSWER_TOKENS, _THINKS_S = 4, 48, 3.0
_SYSTEM_PROMPTS = [
    f"You are the assistant of team {team}. " + f"A rule of team {team}: answer in short and plain sentences. " * 40
    for team in ("red", "green", "blue", "white")
]
_COLOURS = ("red", "green", "blue", "black", "white", "orange")

Message = dict[str, Any]
Beginning = Callable[[random.Random], list[Message]]


def _chat(dice: random.Random) -> list[Message]:
    """The messages before the first question."""
    return [{"role": "system", "content": dice.choice(_SYSTEM_PROMPTS)}]


def _images(dice: random.Random) -> list[Message]:
    """The same, with a picture."""
    image = Image.new("RGB", (256, 256), dice.choice(_COLOURS))
    content = [picture(image), {"type": "text", "text": "Here is a picture. I have some questions."}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "I see it."}]


async def run(cluster: Cluster, model: str) -> None:
    """Send until cancelled. Failures are left out here: the cluster tells of them."""
    gateways = cycle(gateway.url for gateway in cluster.gateways)
    beginnings = cycle((_chat, _images))
    async with client(None) as http, asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(_client(http, gateways, model, next(beginnings), random.Random(number)))


async def _client(
    http: httpx.AsyncClient, gateways: Iterator[str], model: str, beginning: Beginning, dice: random.Random
) -> None:
    await asyncio.sleep(dice.random() * _THINKS_S)
    while True:
        messages = beginning(dice)
        for turn in range(_TURNS):
            messages.append(
                {"role": "user", "content": f"Question {dice.randrange(1000)}: what comes next, in turn {turn}?"}
            )
            body = {"model": model, "max_tokens": _ANSWER_TOKENS, "stream": True, "messages": messages}
            answer = ""
            with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
                async with http.stream("POST", f"{next(gateways)}/v1/chat/completions", json=body) as reply:
                    async for line in reply.aiter_lines():
                        answer += _text(line)
            messages.append({"role": "assistant", "content": answer or "no answer"})
            await asyncio.sleep(dice.uniform(0.5, 1.5) * _THINKS_S)


def _text(line: str) -> str:
    """The text in a line of a stream; empty if it has none."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return ""
    choices = orjson.loads(data)["choices"]
    return str(choices[0]["delta"].get("content") or "") if choices else ""
