"""The settings of light replicas, which all replicas of one process share."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LightSettings:
    """One light replica. The defaults are those of the simulated replica (gateway/simulator/settings.py)."""

    model: str = "kvgate/sim-vlm"
    served_name: str = "sim"
    block_tokens: int = 16
    num_blocks: int = 8192
    max_running: int = 64
    prefill_tokens_per_s: float = 10_000.0
    decode_s_per_token: float = 0.02
    speed: float = 1.0
    """Every simulated time is divided by it."""
    tokens_per_chunk: int = 1
    """Answer tokens in one chunk of a stream. vLLM sends each token by itself, which costs gateways and clients more
    than everything else."""
    keep_alive_s: float = 60.0
    """Idle connections are closed after this time."""

    @property
    def capacity_tokens(self) -> int:
        """The tokens that the cache holds. It is also the longest prompt plus answer."""
        return self.num_blocks * self.block_tokens

    def at_speed(self, speed: float) -> LightSettings:
        """The same replica in other time."""
        return replace(self, speed=speed)
