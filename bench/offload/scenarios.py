"""The requests to one replica, in the scenarios in which others measured LMCache (published.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.routing.mixes import BYTES_PER_TOKEN, Workload
from bench.workloads import Message, Session, one_turn, picture, question, text, user, words

IMAGES, REQUESTS = 40, 80
_REVISIT_SHARE = 0.7
_CONVERSATIONS, _ACTIVE, _FLOOD = 24, 10, 100
_MEDIAN_OF_AVERAGE = 0.85
"""The ratio of median to average length of the conversations' beginnings. Lengths are lognormal: the default of vLLM's
benchmark of several turns."""
_ASKED = "What is the main subject of this image?"


@dataclass(frozen=True)
class Sizes:
    """Sizes in tokens of 4 bytes, as the simulator counts them. Real tokens differ, and the real model's context is
    small."""

    system: int = 400
    behind_image: int = 0
    """Words after each image. An image of 1024 x 1024 pixels is 6 500 simulated tokens, but some 300 of the small real
    model."""
    common: int = 500
    """The beginning that all conversations share. `own` is the part of each conversation, on average and at most."""
    own: int = 4000
    own_at_most: int = 20_000
    prompt: int = 1024
    """The size of the random prompts, and of the prompt of all-hit."""
    most_answer: int = 128


SIMULATED = Sizes()
REAL = Sizes(system=100, behind_image=1000, common=200, own=700, own_at_most=1000, prompt=700, most_answer=8)
Make = Callable[[int, Sizes], Workload]


@dataclass(frozen=True)
class Scenario:
    """A function that makes the workload from a seed, and the number of requests at once."""

    name: str
    title: str
    concurrency: int
    make: Make


def _in_order(warm_up: list[Session], sessions: list[Session]) -> Workload:
    return Workload(warm_up, sessions, list(range(len(sessions))))


def _text(rng: random.Random, tokens: int) -> str:
    return text(rng, tokens * BYTES_PER_TOKEN)


def _about_images(rng: random.Random, sizes: Sizes) -> list[Session]:
    """For each image one session with the question that is always asked about it, as in the published script."""
    system = {"role": "system", "content": _text(rng, sizes.system)}
    answer = min(60, sizes.most_answer)
    return [
        one_turn(image, system, user(words(_ASKED), picture(rng, 1024), *_behind(rng, sizes)), max_tokens=answer)
        for image in range(IMAGES)
    ]


def _behind(rng: random.Random, sizes: Sizes) -> list[Message]:
    return [words(_text(rng, sizes.behind_image))] if sizes.behind_image else []


def _images(seed: int, sizes: Sizes) -> Workload:
    """Two requests about each image in random order, and one request about each before, in another random order."""
    rng = random.Random(f"images {seed}")
    about = _about_images(rng, sizes)
    return _in_order(rng.sample(about, IMAGES), rng.sample([*about, *about], REQUESTS))


def _revisits(seed: int, sizes: Sizes) -> Workload:
    """Draws like the published script: 3 in 10 requests are about the next new image, the others about an image seen
    before. The requests before the measurement are drawn the same way with another seed, about the same images. Some 25
    of the 40 images are ever used."""
    rng = random.Random(f"revisits {seed}")
    about = _about_images(rng, sizes)
    return _in_order(_drawn(rng, about), _drawn(rng, about))


def _drawn(rng: random.Random, about: Sequence[Session]) -> list[Session]:
    chosen: list[int] = []
    for _ in range(REQUESTS):
        is_new = not chosen or rng.random() >= _REVISIT_SHARE
        chosen.append((max(chosen, default=-1) + 1) % IMAGES if is_new else rng.choice(sorted(set(chosen))))
    return [about[image] for image in chosen]


def _multi_turn(seed: int, sizes: Sizes) -> Workload:
    """24 conversations of 6 to 9 questions, ten of them at a time. Their turns come in random order."""
    rng = random.Random(f"multi-turn {seed}")
    common = _text(rng, sizes.common)
    sigma = math.sqrt(-2 * math.log(_MEDIAN_OF_AVERAGE))
    sessions = []
    for group in range(_CONVERSATIONS):
        own = round(rng.lognormvariate(math.log(sizes.own * _MEDIAN_OF_AVERAGE), sigma))
        system = {"role": "system", "content": f"{common} {_text(rng, min(own, sizes.own_at_most))}"}
        asked = [user(words(_text(rng, rng.randint(120, 160)))) for _ in range(rng.randint(6, 9))]
        turns: list[tuple[Message, ...]] = [(system, asked[0]), *((each,) for each in asked[1:])]
        sessions.append(Session(group, tuple(turns), min(rng.randint(80, 120), sizes.most_answer)))
    return Workload([], sessions, _turns(rng, sessions))


def _turns(rng: random.Random, sessions: Sequence[Session]) -> list[int]:
    left = [len(session.turns) for session in sessions]
    order: list[int] = []
    while active := [index for index, turns in enumerate(left) if turns][:_ACTIVE]:
        order.append(rng.choice(active))
        left[order[-1]] -= 1
    return order


def _random(seed: int, sizes: Sizes) -> Workload:
    """100 prompts at once that share nothing."""
    rng = random.Random(f"random {seed}")
    answer = min(128, sizes.most_answer)
    prompts = [user(words(_text(rng, sizes.prompt)), question(rng, number)) for number in range(_FLOOD)]
    return _in_order([], [one_turn(number, prompt, max_tokens=answer) for number, prompt in enumerate(prompts)])


def _all_hit(seed: int, sizes: Sizes) -> Workload:
    """One prompt, 100 times at once, which is in the GPU's cache."""
    rng = random.Random(f"all-hit {seed}")
    ask = one_turn(0, user(words(_text(rng, sizes.prompt))), max_tokens=min(128, sizes.most_answer))
    return _in_order([ask], [ask] * _FLOOD)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("images", "40 images, each asked about twice, and once before", 4, _images),
        Scenario(
            "revisits", "80 requests about some 25 images, and 80 before, as the published script draws", 4, _revisits
        ),
        Scenario("multi-turn", "24 conversations of 6 to 9 questions, ten at a time", _ACTIVE, _multi_turn),
        Scenario("random", "100 prompts at once, nothing in common", _FLOOD, _random),
        Scenario("all-hit", "one prompt 100 times at once, in the GPU's cache", _FLOOD, _all_hit),
    )
}
