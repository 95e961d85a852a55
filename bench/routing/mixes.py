"""The workloads that compare routers: the requests, the number of replicas, and their cache sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

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
class Size:
    """How large a workload is, compared with the mix as it is."""

    fleet: float = 1.0
    """How many times as many replicas get it. Sessions and contexts grow alike, so each replica's load and working set
    stay the same."""
    requests: float = 1.0
    """How many times as many requests each replica gets."""

    def contexts(self, count: int) -> int:
        return max(1, round(count * self.fleet))

    def sessions(self, count: int) -> int:
        return max(1, round(count * self.fleet * self.requests))

    def draw(self, rng: random.Random, side: int) -> Message:
        """A picture. Thousands of pictures would take minutes to encode, so a larger fleet gets one picture under many
        names. The simulated engines take them for different pictures, but gateways and real engines do not."""
        if self.fleet == 1:
            return picture(rng, side)
        return _blank(side) | {"uuid": f"{rng.getrandbits(64):x}"}


@cache
def _blank(side: int) -> Message:
    return picture(random.Random(side), side)


AS_IT_IS = Size()


@dataclass(frozen=True)
class Mix:
    """A function that makes the workload from a seed, and the fleet for it."""

    name: str
    title: str
    replicas: int
    capacity_tokens: int
    """The size of each replica's KV cache."""
    concurrency: int
    make: Callable[..., Workload]
    """Takes a seed, and the size if it is not as it is."""
    real_capacity_tokens: int = 0
    """The same on real vLLM. Its small model has other image sizes and another tokenizer. 0: the mix does not run
    there."""

    def on(self, replicas: int, requests: int) -> Mix:
        """The same mix for a fleet of another size. Each replica gets at most about this many requests, without the
        requests before the measurement. Only virtual time can run it, because of `Size.draw`."""
        fleet, each = replicas / self.replicas, len(self.make(0).order) / self.replicas
        size = Size(fleet, min(1.0, requests / each))
        concurrency = max(1, round(self.concurrency * fleet))
        return replace(self, replicas=replicas, concurrency=concurrency, make=partial(self.make, size=size))


def _system(rng: random.Random, tokens: int) -> Message:
    return {"role": "system", "content": text(rng, tokens * BYTES_PER_TOKEN)}


def _document(rng: random.Random, tokens: int) -> list[Message]:
    return [words(text(rng, tokens * BYTES_PER_TOKEN))]


def _in_order(warm_up: list[Session], sessions: list[Session]) -> Workload:
    return Workload(warm_up, sessions, [index for index, session in enumerate(sessions) for _ in session.turns])


_ASKED = ("What is the main subject?", "Which words can be read?", "Which colours are there most of?")


def _trace(rng: random.Random, sessions: int, images: int, first: int, size: Size) -> list[Session]:
    """Sessions of three turns about one image each, which is new or was used before. They become single requests that
    do not wait for each other: earlier answers are made up, and are the same in all sessions about an image."""
    system = _system(rng, 400)
    pictures = [size.draw(rng, 1024) for _ in range(images)]
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


def _published(seed: int, size: Size = AS_IT_IS) -> Workload:
    """120 requests about 12 images, after 24 requests about others."""
    rng = random.Random(f"images {seed}")
    images, others = size.contexts(12), size.contexts(3)
    warm_up = _trace(rng, max(others + 1, size.sessions(8)), others, first=images + 88, size=size)
    return _in_order(warm_up, _trace(rng, max(images + 1, size.sessions(40)), images, first=0, size=size))


def _vqa(seed: int, size: Size = AS_IT_IS) -> Workload:
    """Questions about 12 images with a document each, chosen by Zipf's law. There is no warm-up: the first are all
    cold."""
    rng = random.Random(f"vqa {seed}")
    contexts = [[size.draw(rng, 1024), *_document(rng, 1000)] for _ in range(size.contexts(12))]
    chosen = by_zipf(rng, len(contexts), size.sessions(120), 1.0)
    return _in_order([], about(rng, contexts, chosen, _system(rng, 20), _ANSWER_TOKENS))


def _chat(seed: int, size: Size = AS_IT_IS) -> Workload:
    """16 conversations of 6 turns under one system prompt of 600 tokens. Their turns come in random order."""
    rng = random.Random(f"chat {seed}")
    system = _system(rng, 600)
    sessions = []
    for group in range(size.contexts(16)):
        turns: list[tuple[Message, ...]] = [
            (user(*_document(rng, 200), question(rng, group * 10 + turn)),) for turn in range(6)
        ]
        turns[0] = (system, *turns[0])
        sessions.append(Session(group, tuple(turns), max_tokens=32))
    order = [index for index, session in enumerate(sessions) for _ in session.turns]
    rng.shuffle(order)
    return Workload([], sessions, order)


def _documents(
    seed: int, name: str, documents: int, tokens: int, exponent: float, requests: int, size: Size
) -> Workload:
    rng = random.Random(f"{name} {seed}")
    contexts = [_document(rng, tokens) for _ in range(size.contexts(documents))]
    requests = size.sessions(requests)
    chosen = by_zipf(rng, len(contexts), requests + requests // 2, exponent)
    sessions = about(rng, contexts, chosen, _system(rng, 100), _ANSWER_TOKENS)
    return _in_order(sessions[requests:], sessions[:requests])


def _rag(seed: int, size: Size = AS_IT_IS) -> Workload:
    return _documents(seed, "rag", documents=40, tokens=3000, exponent=1.0, requests=300, size=size)


def _books(seed: int, size: Size = AS_IT_IS) -> Workload:
    return _documents(seed, "books", documents=12, tokens=10_000, exponent=1.0, requests=300, size=size)


def _long_tail(working_set: float) -> Callable[..., Workload]:
    documents = round(working_set * 3 * 32_000 / 2000)

    def make(seed: int, size: Size = AS_IT_IS) -> Workload:
        return _documents(seed, "tail", documents, tokens=2000, exponent=0.6, requests=300, size=size)

    return make


def _hostile(seed: int, size: Size = AS_IT_IS) -> Workload:
    """No two prompts have anything in common."""
    rng = random.Random(f"hostile {seed}")
    sessions = [
        one_turn(number, user(*_document(rng, 2000), question(rng, number)), max_tokens=_ANSWER_TOKENS)
        for number in range(size.sessions(340))
    ]
    before = size.sessions(40)
    return _in_order(sessions[:before], sessions[before:])


def _hot(seed: int, size: Size = AS_IT_IS) -> Workload:
    """Three in ten requests are about one document, the others about 80."""
    rng = random.Random(f"hot {seed}")
    others, before = size.contexts(80), size.sessions(160)
    contexts = [_document(rng, 4000), *(_document(rng, 1500) for _ in range(others))]
    chosen = [0 if rng.random() < 0.3 else rng.randrange(1, others + 1) for _ in range(size.sessions(640))]
    sessions = about(rng, contexts, chosen, _system(rng, 100), _ANSWER_TOKENS)
    return _in_order(sessions[:before], sessions[before:])


def _contexts(seed: int, size: Size = AS_IT_IS) -> Workload:
    """Repeated questions about 24 documents and images. These are 64k tokens, which all replicas together can hold
    once."""
    documents, images, before = size.contexts(18), size.contexts(6), size.sessions(600)
    sessions = shared_contexts(
        size.sessions(2600),
        seed=seed,
        documents=documents,
        images=images,
        max_tokens=_ANSWER_TOKENS,
        draw=size.draw,
    )
    return _in_order(sessions[:before], sessions[before:])


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
