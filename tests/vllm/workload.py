"""The requests of the tests' clients: the same for the same seed.

Requests share prefixes as real ones do: a few system prompts, documents of unequal popularity with different
questions, images with questions, and conversations of several turns. Texts mix prose, numbers, code and other scripts,
so that the bytes per token vary within each.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

Messages = list[dict[str, Any]]

_PROSE = (
    "the returns a short answer when every request carries its own limit and nobody waits longer than they said",
    "while the river runs past green tables under an open window north of the old town",
    "where seven people read letters about paper boats and a light that was left burning all night",
)
_CODE_WORDS = (
    "def",
    "return",
    "self.",
    "await",
    "(request)",
    "->",
    "None:",
    "{",
    "}",
    "[0]",
    "==",
    "token_ids",
    "if not",
)
_OTHER_WORDS = ("größer", "übermäßig", "café", "naïve", "данные", "сервер", "東京都", "缓存", "速度", "…", "🚲", "½")
_TILE_COLOURS = 8  # a picture is 8 x 8 tiles of random colours
_PROSE_WORDS = tuple(word for line in _PROSE for word in line.split())
_PICTURE_SIZES = ((112, 112), (224, 160), (320, 320), (160, 224))
_TURNS = 6


@dataclass(frozen=True)
class Ask:
    """One request: its messages, and its subject. Requests with the same subject begin alike."""

    kind: str
    subject: str
    messages: Messages = field(repr=False)


class Workload:
    """An endless series of requests. A conversation's next turn waits for the answer to the turn before."""

    def __init__(self, seed: int, documents: int = 40, pictures: int = 16, conversations: int = 10) -> None:
        self._rng = random.Random(seed)
        self._systems = [text(f"{seed}: instructions {n}", 900) for n in range(3)]
        self._documents = [self._document(f"{seed}: document {n}") for n in range(documents)]
        self._pictures = [self._picture(f"{seed}: picture {n}") for n in range(pictures)]
        self._names = (f"{seed}: conversation {n}" for n in itertools.count())
        self._conversations = [self._begun(next(self._names)) for _ in range(conversations)]
        self._busy: set[str] = set()
        self._questions = itertools.count()

    def next(self) -> Ask:
        """The next request to send; call `answered` or `failed` when it is over."""
        roll = self._rng.random()
        idle = [one for one in self._conversations if one.subject not in self._busy]
        if roll < 0.3 and idle:
            conversation = self._rng.choice(idle)
            self._busy.add(conversation.subject)
            return conversation
        return self.about(_zipf(self._rng, self._documents if roll < 0.75 else self._pictures))

    def about(self, shared: Ask) -> Ask:
        """A new question about a document or a picture."""
        number = next(self._questions)
        question = f"{self._rng.choice(_PROSE_WORDS)} {number}? {text(f'question {number}', 80)}"
        *before, last = shared.messages
        content = last["content"]
        asked = [*content, _part(question)] if isinstance(content, list) else f"{content}\n\n{question}"
        return Ask(shared.kind, shared.subject, [*before, {**last, "content": asked}])

    def answered(self, ask: Ask, answer: str) -> None:
        """Notes the answer to `ask`. In a conversation, prepares the next turn or a new conversation."""
        self._busy.discard(ask.subject)
        for n, conversation in enumerate(self._conversations):
            if conversation.subject == ask.subject:
                said = [*ask.messages, {"role": "assistant", "content": answer}]
                question = {"role": "user", "content": text(f"{ask.subject}, {len(said)}", self._rng.randint(100, 900))}
                is_over = len(said) >= 2 * _TURNS
                following = Ask(ask.kind, ask.subject, [*said, question])
                self._conversations[n] = self._begun(next(self._names)) if is_over else following

    def failed(self, ask: Ask) -> None:
        """Notes that `ask` got no answer. Its conversation sends the same turn again later."""
        self._busy.discard(ask.subject)

    @property
    def shared(self) -> Sequence[Ask]:
        """Every document and picture without a question, as requests share it."""
        return [*self._documents, *self._pictures]

    def _document(self, name: str) -> Ask:
        body = text(name, self._rng.randint(1200, 5000))
        return Ask("document", name, [self._system(), {"role": "user", "content": body}])

    def _picture(self, name: str) -> Ask:
        parts = [_part(text(name, self._rng.randint(40, 400))), picture_part(name, self._rng.choice(_PICTURE_SIZES))]
        return Ask("picture", name, [self._system(), {"role": "user", "content": parts}])

    def _begun(self, name: str) -> Ask:
        return Ask("conversation", name, [self._system(), {"role": "user", "content": text(name, 1200)}])

    def _system(self) -> dict[str, Any]:
        return {"role": "system", "content": self._rng.choice(self._systems)}


def _zipf(rng: random.Random, of: Sequence[Ask]) -> Ask:
    return rng.choices(of, weights=[1 / rank for rank in range(1, len(of) + 1)])[0]


def _part(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def text(name: str, size_bytes: int) -> str:
    """A text of about this size that starts with its name. Other names give other texts."""
    rng = random.Random(name)
    words, length = [f"{name}."], len(name)
    while length < size_bytes:
        pool = rng.choices((_PROSE_WORDS, _CODE_WORDS, _OTHER_WORDS), weights=(8, 2, 1))[0]
        sentence = [rng.choice(pool) for _ in range(rng.randint(4, 14))]
        if rng.random() < 0.2:
            sentence.append(str(rng.randrange(10**6)))
        words.append(" ".join(sentence) + ".")
        length += len(words[-1].encode()) + 1
    return " ".join(words)


def picture_part(name: str, size: tuple[int, int] = (224, 160), uuid: str | None = None) -> dict[str, Any]:
    """An image as a data: URL. Other names give other pixels."""
    rng = random.Random(name)
    tiles = Image.frombytes("RGB", (_TILE_COLOURS, _TILE_COLOURS), rng.randbytes(3 * _TILE_COLOURS**2))
    file = io.BytesIO()
    tiles.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    return part if uuid is None else {**part, "uuid": uuid}
