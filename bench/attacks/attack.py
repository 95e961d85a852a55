"""An attack: a sentence that describes the input, and a function that sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.attacks.target import Target, post


@dataclass(frozen=True)
class Outcome:
    """The attacker's result, and the attack's own goal if it was missed."""

    got: str
    missed: str = ""


Run = Callable[[Target], Awaitable[Outcome]]


@dataclass(frozen=True)
class Attack:
    """One attack. `settings` are gateway settings by section. Settings that this gateway does not know are left out."""

    sentence: str
    run: Run
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


async def one_request(target: Target, path: str, body: bytes, kind: str = "application/json") -> Outcome:
    """Sends a single request."""
    return Outcome(str(await target.ask(post(path, body, kind))))
