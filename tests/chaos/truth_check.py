"""What of the map's word on a prompt is so, given the blocks that a replica holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.simulator.chat_template import render_chat
from gateway.simulator.images import ImageReader
from gateway.simulator.prompt import BlockHasher, EnginePrompt

BLOCK_TOKENS = 16
_ESTIMATE_TOKENS = 48
"""How far a gateway's estimate of a key's end may be off, in prompts of this size."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the map says a replica holds of a prompt: the deepest of its keys, and all of their records."""

    keys: int = 0
    tokens: int = 0
    records: tuple[dict[str, Any], ...] = ()

    @property
    def is_resident(self) -> bool:
        """Whether its agent said so, of every key."""
        return all(record["kind"] == "resident" for record in self.records)


def prompt_of(text: str) -> EnginePrompt:
    """What an engine makes of one user's message."""
    return render_chat([{"role": "user", "content": text}], ImageReader())


def fitted(text: str, last_block_tokens: int) -> str:
    """The text, made so long that so many tokens of its prompt are in the last block: 0 fill it. To ask again for a
    prompt whose last block is full, with its answer or without, takes a new block each time, as in vLLM."""
    while prompt_of(text).num_tokens % BLOCK_TOKENS != last_block_tokens:
        text += "x"
    return text


def served_blocks(prompt_tokens: int) -> int:
    """How many blocks of a prompt an engine serves from cache at most: it computes the last token in any case."""
    return (prompt_tokens - 1) // BLOCK_TOKENS


def is_measured(text: str, told: Mapping[str, Told]) -> bool:
    """Whether agents have said, of each replica that is told to hold a prompt, how long it was: nothing is a claim."""
    last_block = served_blocks(prompt_of(text).num_tokens)
    return bool(told) and all(each.is_resident and served_blocks(each.tokens) == last_block for each in told.values())


def path_of(text: str) -> list[str]:
    """The blocks of a prompt of one user's message."""
    prompt = prompt_of(text)
    hasher = BlockHasher(prompt, BLOCK_TOKENS)
    hasher.extend(prompt.tokens)
    return [f"{block_hash:016x}" for block_hash in hasher.hashes]


def depth(path: Sequence[str], held: set[str]) -> int:
    """How many of a prompt's first blocks are held."""
    return next((index for index, block_hash in enumerate(path) if block_hash not in held), len(path))


def untrue(path: Sequence[str], held: set[str], told: Told, claims: bool) -> list[str]:
    """What is told and is not so; of claims, only the deepest is looked at, and only where `claims`."""
    found = []
    for record in told.records:
        if record["kind"] == "resident":
            last = record["tokens"] // BLOCK_TOKENS
            if path[last - 1] != record["block_hash"]:
                found.append(f"watches {record['block_hash']}, which is not block {last} of the prompt")
            elif depth(path, held) < last:
                found.append(f"{record['tokens']} tokens are told, {depth(path, held)} blocks are held")
    is_claim = claims and bool(told.records) and told.records[-1]["kind"] == "claim"
    if is_claim and not _is_near(told.tokens, path, held):
        found.append(f"{told.tokens} tokens are claimed, {depth(path, held)} blocks are held")
    return found


def _is_near(tokens: int, path: Sequence[str], held: set[str]) -> bool:
    return tokens <= depth(path, held) * BLOCK_TOKENS + _ESTIMATE_TOKENS


def untold(path: Sequence[str], held: set[str], told: Told, ends: Sequence[int]) -> list[str]:
    """What is so and is not told; `ends` are the estimated ends of the prompt's keys."""
    deep = depth(path, held)
    surely = sum(end + _ESTIMATE_TOKENS <= deep * BLOCK_TOKENS for end in ends)
    surely = len(ends) if deep == len(path) else surely
    return [f"{deep} blocks are held, only {told.keys} keys of {surely} are told"] if told.keys < surely else []
