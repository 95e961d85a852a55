"""Answers of replicas that lie."""

from __future__ import annotations

from bench.attacks.attack import Outcome, Run
from bench.attacks.target import Target, chat, post


def lie(name: str, *, stream: bool = False) -> Run:
    """A chat that makes every replica tell this lie. An answer that the replica cut short must not look complete."""

    async def run(target: Target) -> Outcome:
        answer = await target.ask(post("/v1/chat/completions", chat(lie=name, stream=stream)))
        is_taken_for_whole = name.endswith("-cut") and answer.status == 200 and answer.is_complete
        return Outcome(
            str(answer), "an answer that was cut short was passed on as complete" if is_taken_for_whole else ""
        )

    return run
