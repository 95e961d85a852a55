"""What an attack is: a sentence that says what is sent, and a function that sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.attacks.target import Target, post


@dataclass(frozen=True)
class Outcome:
    """What the attacker got, and the attack's own goal where it was missed."""

    got: str
    missed: str = ""


Run = Callable[[Target], Awaitable[Outcome]]


@dataclass(frozen=True)
class Attack:
    """One attack. `settings` are of the gateway, by section; what this gateway does not know of them is left out."""

    sentence: str
    run: Run
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


async def one_request(target: Target, path: str, body: bytes, kind: str = "application/json") -> Outcome:
    """What a single request gets."""
    return Outcome(str(await target.ask(post(path, body, kind))))
