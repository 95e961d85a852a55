"""The requests and the answers: prompts by size, answers by length and pace."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

import orjson
from PIL import Image

from bench.overhead.canned import MODEL
from bench.overhead.client import Payload
from bench.workloads import text

PATH = "/v1/chat/completions"
_QUESTION = f"Question {Payload.MARK.decode()}?"
_IMAGE_SIDE = 500  # of noise, which no codec can compress: 1 MB in base64


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
    )
}


def _sized(size_bytes: int) -> list[dict[str, Any]]:
    """A conversation whose body has about this size. It has the same beginning and a new question each time."""
    shared = text(random.Random(7), max(1, size_bytes - 190))
    return [
        {"role": "system", "content": shared},
        {"role": "user", "content": _QUESTION},
    ]


def _with_image() -> list[dict[str, Any]]:
    noise = random.Random(7).randbytes(_IMAGE_SIDE * _IMAGE_SIDE * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (_IMAGE_SIDE, _IMAGE_SIDE), noise).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}],
        }
    ]


PROMPTS = {
    "350 B": lambda: _sized(350),
    "26 KB": lambda: _sized(26_000),
    "130 KB": lambda: _sized(130_000),
    "1 MB image": _with_image,
}


def payload(prompt: str, answer: Answer) -> Payload:
    """The requests of a cell."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": answer.tokens, "messages": PROMPTS[prompt]()}
    if answer.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Payload(PATH, orjson.dumps(body))
