"""Everything that one simulated replica owns: its engines, recent requests, stored responses and faults."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.simulator.engine import Generation, SimEngine
from gateway.simulator.errors import RequestRefused, bad_request
from gateway.simulator.events import EventPublisher
from gateway.simulator.faults import Faults
from gateway.simulator.images import ImageReader
from gateway.simulator.metrics import SimMetrics
from gateway.simulator.mooncake import Mooncake
from gateway.simulator.nixl import Nixl
from gateway.simulator.pd_role import PdRole
from gateway.simulator.prompt import EnginePrompt
from gateway.simulator.protocol import token_limit
from gateway.simulator.settings import SimSettings
from gateway.tasks import Tasks

if TYPE_CHECKING:
    from gateway.simulator.sim_lmcache import SimLmcache

_RECENT = 64
_TAGS = frozenset({"weights", "kv_cache"})


@dataclass(slots=True)
class StoredResponse:
    """A /v1/responses object, and the conversation up to it."""

    response: dict[str, Any]
    messages: list[Any]
    generation: Generation


class Sleep:
    """Whether one replica's engines sleep or are paused, as in vLLM 0.33 with VLLM_SERVER_DEV_MODE=1.

    /health stays good. While the engines sleep, requests are taken and wait. While they are paused by `abort`, requests
    are refused. A sleep from level 1 on clears the caches, and so does a pause unless told otherwise. No step runs
    then, so the event that says so comes with the first step after the wake-up. The metric tells of sleep, /is_sleeping
    of both.
    """

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = engines
        self._sleeping_tags: frozenset[str] = frozenset()
        self._refuses = False
        self.is_paused = False
        self.level: int | None = None
        """As the metric tells it; None while it says that the engines are awake."""

    @property
    def is_sleeping(self) -> bool:
        return self.is_paused or bool(self._sleeping_tags)

    def refuse_if_paused(self) -> None:
        """Raises a 503."""
        if self._refuses:
            message = "Generation is paused. Please retry after it resumes."
            raise RequestRefused(503, message, None, "ServiceUnavailableError")

    def sleep(self, level: int, mode: str) -> None:
        self._pause(mode, clear_cache=level >= 1)
        if level >= 1:
            self._sleeping_tags = _TAGS
        self.level = level

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Whether all is awake. Without tags, all wakes up."""
        self._sleeping_tags -= frozenset(tags) or _TAGS
        if self._sleeping_tags:
            return False
        self.level = None
        self.resume()
        return True

    def pause(self, mode: str, clear_cache: bool) -> None:
        self._pause(mode, clear_cache)
        self._refuses = mode != "keep"

    def resume(self) -> None:
        self._refuses = self.is_paused = False
        for engine in self._engines:
            engine.set_paused(False)

    def _pause(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True
        for engine in self._engines:
            engine.set_paused(True)
            if mode == "abort":
                engine.abort_all()
            if clear_cache:
                engine.reset_caches()


class SimReplica:
    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.images = ImageReader()
        self.faults = Faults()
        self.metrics = SimMetrics(settings, self.images)
        self.publishers = [EventPublisher(settings, rank, self.faults) for rank in settings.ranks if settings.events]
        self.lmcache = _lmcache(settings)
        self.tasks = Tasks()
        self.nixl = Nixl(settings.recomputes, settings.transfer_s_per_token) if settings.nixl else None
        self.mooncake = (
            Mooncake(settings.recomputes, settings.transfer_s_per_token, self.tasks) if settings.mooncake else None
        )
        self.engines = [
            SimEngine(
                settings,
                self.metrics.observer(rank),
                publish=self.publishers[place].publish if settings.events else None,
                lmcache=self.lmcache,
                faults=self.faults,
            )
            for place, rank in enumerate(settings.ranks)
        ]
        self.sleep = Sleep(self.engines)
        self.metrics.watch(self.engines, lambda: self.sleep.level)
        can_switch = self.nixl is not None and settings.pd_role
        self.pd_role = PdRole(settings.pd_role, self.nixl, self.tasks) if can_switch and self.nixl else None
        self.adapters = list(settings.adapters)
        self.recent: deque[tuple[dict[str, Any], Generation]] = deque(maxlen=_RECENT)
        """The requests that reached an engine: what /sim/state shows of them, and their generations."""
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_requests = 0
        self.num_lora_calls = 0

    def start(self) -> None:
        """Raises OSError if a port for KV events is taken. `close` is needed then, too."""
        for publisher in self.publishers:
            publisher.bind()
            self.tasks.spawn(publisher.serve_replays(), "replays of KV events")
        for engine in self.engines:
            self.tasks.spawn(engine.run(), "an engine's steps")

    async def close(self) -> None:
        await self.tasks.close()
        if self.lmcache is not None:
            await self.lmcache.close()
        for publisher in self.publishers:
            publisher.close()

    def resolve_model(self, name: str | None) -> tuple[str, str | None]:
        """The name in the answer, and its LoRA adapter. No name means the base model."""
        if not name:
            return self.settings.served_names[0], None
        if name in self.settings.served_names:
            return name, None
        if name in self.adapters:
            return name, name
        raise RequestRefused(404, f"The model `{name}` does not exist.", "model")

    def token_limit(self, prompt: EnginePrompt, max_tokens: int | None) -> int:
        """As protocol.token_limit, for this model. Raises a 400, too, if the prompt leaves no room."""
        limit = token_limit(max_tokens, prompt.num_tokens, self.settings.max_model_len)
        self.check_length(prompt, room=1)
        return limit

    def clear_caches(self, cpu_tier: bool = False) -> bool:
        """Returns False if an engine has blocks in use. The other engines are cleared nevertheless."""
        cleared = [engine.clear_cache() for engine in self.engines]
        if cpu_tier:
            for engine in self.engines:
                engine.cpu_tier.clear()
            if self.lmcache is not None:
                self.lmcache.clear_cpu()
        return all(cleared)

    def state(self) -> dict[str, Any]:
        """The answer of GET /sim/state, summed over all engines."""
        stats = [engine.stats for engine in self.engines]
        return {
            "id": self.settings.id,
            "running": sum(len(engine.running) for engine in self.engines),
            "waiting": sum(len(engine.waiting) for engine in self.engines),
            "requests": self.num_requests,
            "aborted": sum(each.requests["abort"] for each in stats),
            "blocks_used": sum(engine.cache.num_held for engine in self.engines),
            "block_hashes": len(set().union(*(engine.cache.hashes() for engine in self.engines))),
            "cpu_blocks": sum(len(engine.cpu_tier) for engine in self.engines),
            "blocks_stored": sum(each.blocks_stored for each in stats),
            "prompt_tokens": sum(each.prefix_queries_tokens for each in stats),
            "cached_tokens": sum(each.prefix_hits_tokens + each.external_hits_tokens for each in stats),
            "lmcache": None if self.lmcache is None else self.lmcache.stats,
            "nixl": None if self.nixl is None else self.nixl.counts,
            "mooncake": None if self.mooncake is None else self.mooncake.counts,
            "lora_calls": self.num_lora_calls,
            "failing": self.faults.active(),
            "blocked": self.faults.blocked,
            "recent": [told | _prompts_of(generation) for told, generation in self.recent],
        }

    def check_length(self, prompt: EnginePrompt, room: int) -> None:
        """Raises a 400 unless the prompt leaves this many tokens of the model's length."""
        if prompt.num_tokens == 0:
            raise bad_request("The decoder prompt cannot be empty")
        limit = self.settings.max_model_len
        if prompt.num_tokens + room > limit:  # libraries of clients know the first words
            message = f"This model's maximum context length is {limit} tokens. Your prompt has {prompt.num_tokens}."
            raise bad_request(message, "input_tokens")

    def engine_for(self, headers: Mapping[str, str]) -> SimEngine:
        """The engine in the header, else the least loaded one. As in vLLM, the header counts this server's engines, or
        those of the whole deployment behind the front end in Rust, and it is ignored if it is no number."""
        rank, is_rust = headers.get("X-data-parallel-rank", ""), self.settings.rust_frontend
        if not re.fullmatch(r"[0-9]{1,9}" if is_rust else r"-?[0-9]{1,9}", rank):
            return min(self.engines, key=lambda engine: 4 * len(engine.waiting) + len(engine.running))
        named = self.settings.ranks if is_rust else range(len(self.engines))
        if int(rank) not in named:
            out_of_range = f"data_parallel_rank {rank} is out of range [0, {len(self.engines)})."
            raise bad_request("engine-core error" if is_rust else out_of_range)
        return self.engines[named.index(int(rank))]


def _lmcache(settings: SimSettings) -> SimLmcache | None:
    if settings.lmcache is None:
        return None
    from gateway.simulator.sim_lmcache import SimLmcache  # few replicas have one, and redis-py takes 50 ms to import

    return SimLmcache(settings.lmcache, settings.model, settings.speed)


def _prompts_of(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    spans = [span for sequence in generation.sequences for span in sequence.prompt.images]
    counts = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
    counts["completion_tokens"] = usage.completion_tokens
    return {**counts, "image_ids": [span.identity for span in spans]}
