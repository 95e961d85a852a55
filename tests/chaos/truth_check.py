"""Compares the map's records of a prompt with the blocks that a replica holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.simulator.chat_template import render_chat
from gateway.simulator.images import ImageReader
from gateway.simulator.prompt import BlockHasher, EnginePrompt

BLOCK_TOKENS = 16
_ESTIMATE_TOKENS = 48
"""The largest allowed error of a gateway's estimate of a key's end, for prompts of this size."""


@dataclass(frozen=True, slots=True)
class Told:
    """The part of a prompt that a replica holds according to the map: the number of its keys, their end, and the keys'
    records."""

    keys: int = 0
    tokens: int = 0
    records: tuple[dict[str, Any], ...] = ()

    @property
    def is_resident(self) -> bool:
        """Whether the replica's agent has confirmed every key."""
        return all(record["kind"] == "resident" for record in self.records)


def prompt_of(text: str) -> EnginePrompt:
    """The engine's prompt for one user message."""
    return render_chat([{"role": "user", "content": text}], ImageReader())


def fitted(text: str, last_block_tokens: int) -> str:
    """The text, extended until the last block has this many of the prompt's tokens; 0 means a full block. A repeated
    request whose last block is full, with its answer or without, takes a new block each time, as in vLLM."""
    while prompt_of(text).num_tokens % BLOCK_TOKENS != last_block_tokens:
        text += "x"
    return text


def served_blocks(prompt_tokens: int) -> int:
    """The most blocks of a prompt that an engine serves from its cache: it always computes the last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS


def is_measured(text: str, told: Mapping[str, Told]) -> bool:
    """Whether agents have confirmed the prompt's whole length on each replica in the map: no record is a claim."""
    last_block = served_blocks(prompt_of(text).num_tokens)
    return bool(told) and all(each.is_resident and served_blocks(each.tokens) == last_block for each in told.values())


@cache
def path_of(text: str) -> list[str]:
    """The block hashes of a prompt of one user message."""
    prompt = prompt_of(text)
    hasher = BlockHasher(prompt, BLOCK_TOKENS)
    hasher.extend(prompt.tokens)
    return [f"{block_hash:016x}" for block_hash in hasher.hashes]


def depth(path: Sequence[str], held: set[str]) -> int:
    """How many of a prompt's first blocks are held without a gap."""
    return next((index for index, block_hash in enumerate(path) if block_hash not in held), len(path))


def untrue(path: Sequence[str], held: set[str], told: Told, claims: bool) -> list[str]:
    """Errors in the map: records that are not true. With `claims`, also checks the deepest record if it is a claim."""
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
    """Gaps in the map: held keys without a record. `ends` are the estimated ends of the prompt's keys."""
    deep = depth(path, held)
    surely = sum(end + _ESTIMATE_TOKENS <= deep * BLOCK_TOKENS for end in ends)
    surely = len(ends) if deep == len(path) else surely
    return [f"{deep} blocks are held, only {told.keys} keys of {surely} are told"] if told.keys < surely else []
