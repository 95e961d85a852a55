"""The clients' requests, as seeded and repeatable lists of sessions."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

Message = dict[str, Any]

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


@dataclass(frozen=True, slots=True)
class Session:
    """The requests of one client, turn by turn. Each turn follows the answer to the previous one.

    `group` is what perfect pinning would send to one replica.
    """

    group: int
    turns: tuple[tuple[Message, ...], ...]
    """The messages that each turn adds."""
    max_tokens: int = 4


def one_turn(group: int, *messages: Message, max_tokens: int = 4) -> Session:
    """A client that asks once."""
    return Session(group, (messages,), max_tokens)


def user(*parts: Message) -> Message:
    return {"role": "user", "content": list(parts)}


def words(content: str) -> Message:
    """A part of a message."""
    return {"type": "text", "text": content}


def text(rng: random.Random, size_bytes: int) -> str:
    chosen: list[str] = []
    length = 0
    while length < size_bytes:
        word = rng.choice(_WORDS)
        chosen.append(word)
        length += len(word) + 1
    return " ".join(chosen)


def picture(rng: random.Random, side: int) -> Message:
    """A part of a message: a square image with this side in pixels, as a data: URL."""
    image = Image.new("RGB", (side, side), tuple(rng.randrange(256) for _ in range(3)))
    image.putpixel((rng.randrange(side), rng.randrange(side)), (1, 2, 3))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def question(rng: random.Random, number: int) -> Message:
    """A part of a message that appears in no other request."""
    return words(f"Question {number}: {text(rng, 60)}?")


def by_zipf(rng: random.Random, among: int, count: int, exponent: float) -> list[int]:
    """Chooses `count` times among unequally popular things, in random order."""
    order = list(range(among))
    rng.shuffle(order)
    return rng.choices(order, [1 / (rank + 1) ** exponent for rank in range(among)], k=count)


def about(
    rng: random.Random,
    contexts: Sequence[Sequence[Message]],
    chosen: Sequence[int],
    system: Message,
    max_tokens: int = 4,
) -> list[Session]:
    """One new question for each chosen context, under one system prompt for all."""
    return [
        one_turn(group, system, user(*contexts[group], question(rng, number)), max_tokens=max_tokens)
        for number, group in enumerate(chosen)
    ]


def shared_contexts(
    requests: int,
    *,
    seed: int,
    documents: int = 18,
    images: int = 6,
    document_bytes: int = 12_000,
    side: int = 512,
    max_tokens: int = 4,
) -> list[Session]:
    """Questions about a few documents and images, chosen by Zipf's law (exponent 0.6).

    Every question is new. A document or image is used again and again, under one short system prompt for all.
    """
    rng = random.Random(seed)
    contexts = [[words(text(rng, document_bytes))] for _ in range(documents)]
    contexts += [[picture(rng, side)] for _ in range(images)]
    chosen = by_zipf(rng, len(contexts), requests, 0.6)
    system = {"role": "system", "content": "You answer questions about what you are shown, briefly."}
    return about(rng, contexts, chosen, system, max_tokens)
