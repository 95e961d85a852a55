"""The workloads that compare routers: the requests, the number of replicas, and their cache sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.workloads import (
    Message,
    Session,
    about,
    by_zipf,
    one_turn,
    picture,
    question,
    shared_contexts,
    text,
    user,
    words,
)

BYTES_PER_TOKEN = 4
_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Workload:
    """The requests before and in the measurement. `order` names a session for each of its turns."""

    warm_up: list[Session]
    sessions: list[Session]
    order: list[int]


@dataclass(frozen=True)
class Mix:
    """A function that makes the workload from a seed, and the fleet for it."""

    name: str
    title: str
    replicas: int
    capacity_tokens: int
    """The size of each replica's KV cache."""
    concurrency: int
    make: Callable[[int], Workload]
    real_capacity_tokens: int = 0
    """The same on real vLLM. Its small model has other image sizes and another tokenizer. 0: the mix does not run
    there."""


def _system(rng: random.Random, tokens: int) -> Message:
    return {"role": "system", "content": text(rng, tokens * BYTES_PER_TOKEN)}


def _document(rng: random.Random, tokens: int) -> list[Message]:
    return [words(text(rng, tokens * BYTES_PER_TOKEN))]


def _in_order(warm_up: list[Session], sessions: list[Session]) -> Workload:
    return Workload(warm_up, sessions, [index for index, session in enumerate(sessions) for _ in session.turns])


_ASKED = ("What is the main subject?", "Which words can be read?", "Which colours are there most of?")


def _trace(rng: random.Random, sessions: int, images: int, first: int) -> list[Session]:
    """Sessions of three turns about one image each, which is new or was used before. They become single requests that
    do not wait for each other: earlier answers are made up, and are the same in all sessions about an image."""
    system = _system(rng, 400)
    pictures = [picture(rng, 1024) for _ in range(images)]
    begins = {0, *rng.sample(range(1, sessions), images - 1)}
    made, seen = [], 0
    for number in range(sessions):
        seen += number in begins
        image = seen - 1 if number in begins else rng.randrange(seen)
        said = [system]
        for turn, asked in enumerate(_ASKED):
            said.append(user(*([] if turn else [pictures[image]]), words(asked)))
            made.append(one_turn(first + image, *said, max_tokens=60))
            said.append({"role": "assistant", "content": f"What turn {turn} about image {image} was answered."})
    return made


def _published(seed: int) -> Workload:
    """120 requests about 12 images, after 24 requests about others."""
    rng = random.Random(f"images {seed}")
    warm_up = _trace(rng, sessions=8, images=3, first=100)
    return _in_order(warm_up, _trace(rng, sessions=40, images=12, first=0))


def _vqa(seed: int) -> Workload:
    """Questions about 12 images with a document each, chosen by Zipf's law. There is no warm-up: the first are all
    cold."""
    rng = random.Random(f"vqa {seed}")
    contexts = [[picture(rng, 1024), *_document(rng, 1000)] for _ in range(12)]
    chosen = by_zipf(rng, len(contexts), 120, 1.0)
    return _in_order([], about(rng, contexts, chosen, _system(rng, 20), _ANSWER_TOKENS))


def _chat(seed: int) -> Workload:
    """16 conversations of 6 turns under one system prompt of 600 tokens. Their turns come in random order."""
    rng = random.Random(f"chat {seed}")
    system = _system(rng, 600)
    sessions = []
    for group in range(16):
        turns: list[tuple[Message, ...]] = [
            (user(*_document(rng, 200), question(rng, group * 10 + turn)),) for turn in range(6)
        ]
        turns[0] = (system, *turns[0])
        sessions.append(Session(group, tuple(turns), max_tokens=32))
    order = [index for index, session in enumerate(sessions) for _ in session.turns]
    rng.shuffle(order)
    return Workload([], sessions, order)


def _documents(seed: int, name: str, documents: int, tokens: int, exponent: float, requests: int) -> Workload:
    rng = random.Random(f"{name} {seed}")
    contexts = [_document(rng, tokens) for _ in range(documents)]
    chosen = by_zipf(rng, len(contexts), requests + requests // 2, exponent)
    sessions = about(rng, contexts, chosen, _system(rng, 100), _ANSWER_TOKENS)
    return _in_order(sessions[requests:], sessions[:requests])


def _rag(seed: int) -> Workload:
    return _documents(seed, "rag", documents=40, tokens=3000, exponent=1.0, requests=300)


def _books(seed: int) -> Workload:
    return _documents(seed, "books", documents=12, tokens=10_000, exponent=1.0, requests=300)


def _long_tail(working_set: float) -> Callable[[int], Workload]:
    documents = round(working_set * 3 * 32_000 / 2000)

    def make(seed: int) -> Workload:
        return _documents(seed, "tail", documents, tokens=2000, exponent=0.6, requests=300)

    return make


def _hostile(seed: int) -> Workload:
    """No two prompts have anything in common."""
    rng = random.Random(f"hostile {seed}")
    sessions = [
        one_turn(number, user(*_document(rng, 2000), question(rng, number)), max_tokens=_ANSWER_TOKENS)
        for number in range(340)
    ]
    return _in_order(sessions[:40], sessions[40:])


def _hot(seed: int) -> Workload:
    """Three in ten requests are about one document, the others about 80."""
    rng = random.Random(f"hot {seed}")
    contexts = [_document(rng, 4000), *(_document(rng, 1500) for _ in range(80))]
    chosen = [0 if rng.random() < 0.3 else rng.randrange(1, len(contexts)) for _ in range(640)]
    sessions = about(rng, contexts, chosen, _system(rng, 100), _ANSWER_TOKENS)
    return _in_order(sessions[:160], sessions[160:])


def _contexts(seed: int) -> Workload:
    """Repeated questions about 24 documents and images. These are 64k tokens, which all replicas together can hold
    once."""
    sessions = shared_contexts(2600, seed=seed, max_tokens=_ANSWER_TOKENS)
    return _in_order(sessions[:600], sessions[600:])


def _named(mixes: Sequence[Mix]) -> dict[str, Mix]:
    return {mix.name: mix for mix in mixes}


# The first is the experiment that the KVGate blog published (two A40s, LLaVA-OneVision-7B, 3 000 blocks of KV each).
# For the next two, results of other routers on real vLLM are known.
MIXES = _named(
    (
        Mix("images", "120 requests about 12 images", 2, 48_000, 8, _published),
        Mix("vqa", "questions about 12 images with documents, by Zipf", 2, 56_000, 8, _vqa, 12_000),
        Mix("chat", "16 conversations under one system prompt", 2, 20_000, 8, _chat, 29_000),
        Mix("contexts", "2 000 questions about 24 documents and images", 3, 32_000, 12, _contexts),
        Mix("rag", "questions about 40 documents, by Zipf", 3, 48_000, 12, _rag),
        Mix("books", "questions about 12 long documents, by Zipf", 3, 48_000, 12, _books),
        Mix("hostile", "no two prompts alike", 3, 48_000, 12, _hostile),
        Mix("hot", "3 in 10 requests about one document", 4, 48_000, 32, _hot),
        Mix("tail-1.5", "documents for 1.5 times all caches", 3, 32_000, 12, _long_tail(1.5)),
        Mix("tail-3", "documents for 3 times all caches", 3, 32_000, 12, _long_tail(3)),
    )
)
