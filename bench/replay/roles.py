"""Replicas of which some only compute prompts, and others only decode: simulated replicas with NIXL, each a process.

In contrast to light replicas, a prompt that a replica computes delays the tokens of all answers that it decodes. A step
computes up to 8192 tokens of the recording, as vLLM with `--max-num-batched-tokens 8192`. Two things of scaled tokens
do not scale: KV moves in the time of the tokens that are sent (9 us each), and decode's first token takes as long as
the tokens of the recording that it stands for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cluster import running_replicas, told_roles
from bench.load import BLOCK_TOKENS, MODEL
from bench.replay.fleet import CONFIG, Setup
from bench.replay.trace import Trace
from bench.routing.fleets import PREFILL_TOKENS_PER_S, Fleet

_STEP_TOKENS = 8192
_LEAST_TOKENS = 512
"""The default of `pairs.min_tokens`, which is in tokens of the recording here."""


@contextmanager
def running_roles(setup: Setup, trace: Trace) -> Iterator[Fleet]:
    """New replicas with empty caches."""
    arguments = {
        "--speed": setup.speed,
        "--num-gpu-blocks": setup.capacity_tokens(trace) // BLOCK_TOKENS,
        "--prefill-tokens-per-s": PREFILL_TOKENS_PER_S * setup.tokens_scale,
        "--decode-s-per-token": setup.decode_s_per_token,
        "--max-num-batched-tokens": round(_STEP_TOKENS * setup.tokens_scale),
    }
    flat = ("--nixl", "--recomputes", *(str(part) for pair in arguments.items() for part in pair))
    config = CONFIG | {
        "hedge": {"max_share": 0},  # pairs have none
        "pairs": {"min_tokens": round(_LEAST_TOKENS * setup.tokens_scale)},
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        running_replicas(Path(folder), setup.replicas, flat) as sims,
    ):
        beside = told_roles(sims, setup.prefills or 0)
        urls = {sim.id: sim.url for sim in sims}
        yield Fleet("simulated", urls, MODEL, BLOCK_TOKENS, setup.speed, config=config, beside=beside)
