"""Parses what a replica tells of itself: its models, the size of its cache, its start time, its counters. Pure.

Sources: GET /v1/models (vLLM's cards: id, root, parent) and GET /metrics (Prometheus text under vLLM's names). A
server that is not vLLM may have neither root nor metrics; then nothing is assumed.

vLLM has two front ends, in Python and in Rust. The one in Rust tells less, and always in the format OpenMetrics, which
ends with a line of its own. The one in Python does so only if it is asked to, and nobody here asks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

_FIGURES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "vllm:inter_token_latency_seconds_sum": "decode_s",
    "vllm:request_prefill_time_seconds_sum": "prefill_s",
    "vllm:request_prefill_time_seconds_count": "prefills",
    "vllm:request_prefill_kv_computed_tokens_sum": "prefill_computed_tokens",
    "vllm:kv_offload_load_time_total": "cpu_load_s",
    "vllm:nixl_xfer_time_seconds_count": "transfers",
}
SESSIONS_SINCE = (0, 30)
"""The first version of vLLM whose events name sessions. Without them, no block of a prompt is found."""
_CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_SLEEP = "vllm:engine_sleep_state"
_CACHE_CONFIG = "vllm:cache_config_info"

# Each pattern takes time in proportion to the text, whatever the text is: no part of a pattern can match across lines,
# and each pattern begins with a line break and letters, which re finds quickly.
_NAMES = "|".join(name.removeprefix("vllm:") for name in (_CACHE_CONFIG, _CACHED_BY_SOURCE, _SLEEP, *_FIGURES))
_SAMPLE = re.compile(rf"\n(?P<name>vllm:(?:{_NAMES}))(?:\{{(?P<labels>[^}}\n]{{0,8192}})\}})?[ \t]+(?P<value>\S+)")
_STARTED = re.compile(r"\nprocess_start_time_seconds[ \t]+(\S+)")
_LABEL = re.compile(r'\b(\w++)="([^"]*)"')
_ENGINE = re.compile(r'\bengine="([^"]*)"')
_SOURCE_HOST, _SOURCE_P2P = re.compile(r'\bsource="host"'), re.compile(r'\bsource="p2p"')
_AWAKE = re.compile(r'\bsleep_state="awake"')
_WHOLE = re.compile(r"[0-9]{1,12}")
_END_OF_OPENMETRICS = "# EOF"
_MAX_CAPACITY_TOKENS = 10**12
_MAX_SAMPLES = 8192
_MAX_CARDS = 4096


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One served name. A LoRA adapter has a `parent`: its base model."""

    id: str
    root: str
    parent: str | None
    document: dict[str, Any]
    """The card as the replica sent it, for GET /v1/models."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a prompt and its answer; 0 if the card does not tell."""
        return max_tokens_of(self.document)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts in /metrics; 0 and empty if they are missing."""

    capacity_tokens: int = 0
    started: str = ""
    """The start time of the engine process in hex milliseconds: every gateway reads the same."""
    block_size: int = 0
    """Tokens in one block of its cache."""
    ranks: tuple[int, ...] = ()
    """The data-parallel ranks behind this one address, of all ranks of the deployment."""
    is_rust: bool = False
    """Whether the server is vLLM's front end in Rust."""
    is_asleep: bool | None = None
    """Whether POST /sleep was called; None if the engine does not tell. Metrics do not tell that it is paused."""
    figures: dict[str, float] = field(default_factory=dict)
    """running, waiting, kv_usage (0..1), prefix_queries_tokens, prefix_hits_tokens; generated_tokens, the first_tokens
    among them, and decode_s, the time that each sequence waited for its others; prefills with their prefill_s and
    prefill_computed_tokens; cpu_load_s and cpu_loaded_tokens of loads from CPU memory."""

    def header_rank(self, dp_rank: int) -> int | None:
        """What X-data-parallel-rank calls this rank: vLLM's front end in Python counts the ranks of its server from 0,
        the one in Rust those of the deployment. None if the server has only one."""
        if dp_rank not in self.ranks:
            return dp_rank
        if len(self.ranks) == 1:
            return None
        return dp_rank if self.is_rust else self.ranks.index(dp_rank)

    def contradiction(self, dp_rank: int | None) -> str:
        """Why no replica of this server has this configured rank; empty if one has, or if the server tells no rank."""
        if not self.ranks or dp_rank in self.ranks or (dp_rank is None and len(self.ranks) == 1):
            return ""
        first, last = self.ranks[0], self.ranks[-1]
        there = f"{len(self.ranks)} ranks, {first} to {last}" if first < last else f"rank {first} only"
        if dp_rank is None:
            return (
                f"a data-parallel server with {there}, behind one address: list it once per rank, each with its own id "
                "and dp_rank"
            )
        return f"dp_rank is {dp_rank}, but its server has {there} (of all ranks of the deployment)"


def max_tokens_of(card: dict[str, Any]) -> int:
    """`max_model_len` of a model's card; 0 if it has none."""
    length = card.get("max_model_len")
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else 0


def parse_models(document: Any) -> list[ModelCard]:
    """The cards of a /v1/models answer; other entries are skipped."""
    cards = []
    listed = document.get("data") if isinstance(document, dict) else None
    for card in listed[:_MAX_CARDS] if isinstance(listed, list) else ():
        if isinstance(card, dict) and isinstance(card.get("id"), str):
            root, parent = card.get("root"), card.get("parent")
            cards.append(
                ModelCard(
                    id=card["id"],
                    root=root if isinstance(root, str) and root else card["id"],
                    parent=parent if isinstance(parent, str) and parent else None,
                    document=card,
                )
            )
    return cards


def base_card(cards: list[ModelCard]) -> ModelCard | None:
    """The model that the engine runs: the first card without a parent. Adapters and aliases share it."""
    return next((card for card in cards if card.parent is None), cards[0] if cards else None)


def parse_metrics(text: str, dp_rank: int | None) -> EngineFacts:
    """The facts in a Prometheus exposition. Other text has none.

    They are those of `dp_rank`; without one, those of the only rank, or of rank 0 among several. With vLLM's external
    load balancing each server has one rank, under its number in the whole deployment."""
    figures: dict[int, dict[str, float]] = {}
    configs: dict[int, str] = {}
    ranks: set[int] = set()
    asleep: dict[int, bool] = {}
    for sample in _samples(text):
        name, labels = sample["name"], sample["labels"] or ""
        found = _ENGINE.search(labels)
        rank = _whole(found[1]) if found else 0
        if found:
            ranks.add(rank)
        if name == _CACHE_CONFIG:
            configs[rank] = labels
        elif name == _SLEEP:
            if _AWAKE.search(labels):
                asleep[rank] = _number(sample["value"]) == 0
        elif name in _FIGURES:
            figures.setdefault(rank, {})[_FIGURES[name]] = _number(sample["value"])
        elif _SOURCE_HOST.search(labels):
            figures.setdefault(rank, {})["cpu_loaded_tokens"] = _number(sample["value"])
        elif _SOURCE_P2P.search(labels) and (tokens := _number(sample["value"])):
            figures.setdefault(rank, {})["transfers"] = tokens  # Mooncake counts its transfers where they come from
    rank = chosen_rank(ranks, dp_rank)
    cache = dict(_LABEL.findall(configs.get(rank, "")))
    block_size = _whole(cache.get("block_size"))
    # Groups of layers share the blocks, so only vLLM's own figure is one of prompt tokens; older versions lack it. The
    # number of blocks is that of all ranks together.
    told_tokens = _whole(cache.get("kv_cache_size_tokens"))
    capacity_tokens = told_tokens or block_size * _whole(cache.get("num_gpu_blocks")) // max(1, len(ranks))
    started = _STARTED.search("\n" + text)
    return EngineFacts(
        capacity_tokens=min(capacity_tokens, _MAX_CAPACITY_TOKENS),
        started=_hex_ms(started[1]) if started else "",
        block_size=block_size,
        ranks=tuple(sorted(ranks)),
        is_rust=text.rstrip().endswith(_END_OF_OPENMETRICS),
        is_asleep=asleep.get(rank),
        figures=figures.get(rank, {}),
    )


def chosen_rank(ranks: Collection[int], dp_rank: int | None) -> int:
    """The rank that a replica is: `dp_rank`; without one, the only one of `ranks`, else 0."""
    if dp_rank is None and len(ranks) == 1:
        return next(iter(ranks))
    return dp_rank or 0


def parse_sleep(document: Any) -> bool | None:
    """Whether the engine sleeps or is paused, from its answer to GET /is_sleeping, which only servers in vLLM's
    development mode have; None if it does not tell."""
    told = document.get("is_sleeping") if isinstance(document, dict) else None
    return told if isinstance(told, bool) else None


def decode_tokens_per_s(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """How many tokens of one sequence an engine has generated in a second, by the growth of its figures; 0 if they do
    not tell. Figures that are smaller than `before` are those of a new engine."""
    names = "generated_tokens", "first_tokens", "decode_s"
    is_new = any(now.get(name, 0) < before.get(name, 0) for name in names)
    tokens, first_tokens, seconds = (now.get(name, 0) - (0 if is_new else before.get(name, 0)) for name in names)
    return (tokens - first_tokens) / seconds if seconds > 0 and tokens > first_tokens else 0.0


def cache_settings(text: str) -> dict[str, str]:
    """The settings of the engine's cache in a Prometheus exposition: the labels of vllm:cache_config_info, which all
    ranks share. Raises ValueError if there are none."""
    for sample in _samples(text):
        if sample["name"] == _CACHE_CONFIG:
            return dict(_LABEL.findall(sample["labels"] or ""))
    raise ValueError(f"no {_CACHE_CONFIG}")


def _samples(text: str) -> Iterator[re.Match[str]]:
    """The samples under the names above."""
    return islice(_SAMPLE.finditer("\n" + text), _MAX_SAMPLES)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and _WHOLE.fullmatch(text) else 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if isfinite(value) else 0.0


def _hex_ms(text: str) -> str:
    try:
        return f"{int(float(text) * 1000):x}"
    except (ValueError, OverflowError):
        return ""
