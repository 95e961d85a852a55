"""The prompts of a recording, and what an endless cache finds of exactly these prompts.

Each prompt is one user message. A block's text is made from its id alone, so two prompts have the same text exactly as
far as their ids agree. The simulated engines count four bytes as one token and add the tokens of their chat template
(gateway/simulator/chat_template.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

from bench.load import BLOCK_TOKENS
from bench.replay.trace import Trace, TraceRequest, repeated_blocks
from bench.workloads import Session, one_turn
from gateway.simulator.prompt import TOKEN_BYTES

HEAD_TOKENS, TAIL_TOKENS = 5, 9
"""The chat template's tokens before and after the message."""


def session(request: TraceRequest, block_tokens: int, number: int) -> Session:
    """The request as a client that asks once."""
    message = {"role": "user", "content": content(request, block_tokens)}
    return one_turn(number, message, max_tokens=request.output_tokens)


def content(request: TraceRequest, block_tokens: int) -> str:
    """Text of `input_tokens` tokens."""
    size_bytes = block_tokens * TOKEN_BYTES
    blocks = (shake_128(b"%d" % block).hexdigest(size_bytes // 2) for block in request.block_ids)
    return "".join(blocks)[: request.input_tokens * TOKEN_BYTES]


def sent_tokens(request: TraceRequest) -> int:
    return HEAD_TOKENS + request.input_tokens + TAIL_TOKENS


def findable_tokens(trace: Trace) -> int:
    """The tokens that one engine with an endless cache finds if it gets all prompts in order. No router can find more.

    An engine finds whole blocks only, and always computes the block that holds a prompt's last token.
    """
    found, ended_with = 0, set[int]()
    for request, leading in zip(trace.requests, repeated_blocks(trace.requests), strict=True):
        shared = HEAD_TOKENS + min(leading * trace.block_tokens, request.input_tokens)
        if request.block_ids[-1] in ended_with:  # the same prompt came before
            shared = sent_tokens(request) - 1
        found += shared // BLOCK_TOKENS * BLOCK_TOKENS
        ended_with.add(request.block_ids[-1])
    return found


def longest_tokens(requests: Sequence[TraceRequest]) -> int:
    """The longest prompt with its answer. An engine refuses requests that its cache cannot hold."""
    return max(sent_tokens(request) + request.output_tokens for request in requests)
