"""The requests and the answers: prompts by size, answers by length and pace."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from PIL import Image

from bench.overhead.canned import MODEL
from bench.overhead.client import Payload
from bench.workloads import text

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_QUESTION = f"Question {Payload.MARK.decode()}?"
_IMAGE_SIDE = 500  # of noise, which no codec can compress: 1 MB in base64
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Answer:
    """How the upstream answers. A pace of 0 means one write for all."""

    name: str
    streams: bool
    tokens: int
    pace_ms: float


ANSWERS = {
    each.name: each
    for each in (
        Answer("plain", False, 16, 0),
        Answer("stream 16", True, 16, 0),
        Answer("stream 16 paced", True, 16, 4),
        Answer("stream 256", True, 256, 0),
        Answer("stream 256 paced", True, 256, 4),
        Answer("stream 1000", True, 1000, 0),
        Answer("stream 1000 paced", True, 1000, 4),
    )
}


_Request = tuple[str, dict[str, Any]]
"""A path, and the part of the body that holds the prompt."""


def _sized(size_bytes: int) -> _Request:
    """A conversation whose body has about this size. It has the same beginning and a new question each time."""
    shared = text(random.Random(7), max(1, size_bytes - 190))
    return _CHAT, {"messages": [{"role": "system", "content": shared}, {"role": "user", "content": _QUESTION}]}


def _plain(shared_bytes: int, asked_bytes: int) -> _Request:
    """A prompt without messages. It begins with the same text each time; then a new question comes, of this size."""
    dice = random.Random(7)
    shared, asked = text(dice, shared_bytes), text(dice, asked_bytes)
    return _COMPLETION, {"prompt": f"{shared} {_QUESTION} {asked}"}


def _with_image() -> _Request:
    noise = random.Random(7).randbytes(_IMAGE_SIDE * _IMAGE_SIDE * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (_IMAGE_SIDE, _IMAGE_SIDE), noise).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}]
    return _CHAT, {"messages": [{"role": "user", "content": parts}]}


PROMPTS: Mapping[str, Callable[[], _Request]] = {
    "350 B": lambda: _sized(350),
    "26 KB": lambda: _sized(26_000),
    "130 KB": lambda: _sized(130_000),
    "1 MB image": _with_image,
    "220 KB completion": lambda: _plain(220_000, 0),
    "100k tokens": lambda: _plain(95_000 * _BYTES_PER_TOKEN, 5_000 * _BYTES_PER_TOKEN),
}
OF_PUBLISHED_RUNS = ("220 KB completion", "100k tokens", "stream 1000", "stream 1000 paced")
"""They repeat what llm-d-router published (its issues 1109, 1287 and 1348), and are measured only if somebody asks."""


def payload(prompt: str, answer: Answer) -> Payload:
    """The requests of a cell."""
    path, said = PROMPTS[prompt]()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": answer.tokens, **said}
    if answer.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Payload(path, orjson.dumps(body))
