"""What clients ask, as seeded and repeatable lists of requests."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `group` is what perfect pinning would send to one replica."""

    group: int
    body: dict[str, Any]


def text(rng: random.Random, size_bytes: int) -> str:
    words: list[str] = []
    length = 0
    while length < size_bytes:
        word = rng.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def _image_url(rng: random.Random, side: int) -> str:
    image = Image.new("RGB", (side, side), tuple(rng.randrange(256) for _ in range(3)))
    image.putpixel((rng.randrange(side), rng.randrange(side)), (1, 2, 3))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def shared_contexts(
    requests: int, *, seed: int, documents: int = 18, images: int = 6, document_bytes: int = 12_000, side: int = 512
) -> list[Request]:
    """Questions about a few documents and images, which ones by Zipf's law (exponent 0.6).

    Every question is new; a document or image comes again and again, under one short system prompt for all.
    """
    rng = random.Random(seed)
    system = {"role": "system", "content": "You answer questions about what you are shown, briefly."}
    contexts: list[list[dict[str, Any]]] = [
        [{"type": "text", "text": text(rng, document_bytes)}] for _ in range(documents)
    ] + [[{"type": "image_url", "image_url": {"url": _image_url(rng, side)}}] for _ in range(images)]
    weights = [1 / (rank + 1) ** 0.6 for rank in range(len(contexts))]
    order = list(range(len(contexts)))
    rng.shuffle(order)
    chosen = rng.choices(order, weights, k=requests)
    return [
        Request(
            group,
            {
                "model": "sim",
                "max_tokens": 4,
                "messages": [
                    system,
                    {
                        "role": "user",
                        "content": [*contexts[group], {"type": "text", "text": f"Question {n}: {text(rng, 60)}?"}],
                    },
                ],
            },
        )
        for n, group in enumerate(chosen)
    ]
