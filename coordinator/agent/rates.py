"""Measures how fast an engine computes prompts, and what a load of a token saves compared to that, from the engine's
own counters. Pure.

The counters are vLLM's and those of the LMCache server beside it: seconds and tokens of prefills, seconds and tokens of
loads from CPU memory, bytes per second of LMCache's loads. facts.py and lmcache_server.py in coordinator/engine/ have
their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MIN_COMPUTED_TOKENS = 256
"""A shorter prefill takes as long as one engine step, and tells little of the speed."""
_MIN_PREFILLS = 8
"""Fewer tell little of the speed: the first ones of a fresh engine are slow. A replica that nobody has measured counts
as one of mean speed. But one that seems slow gets no prompts while others have nothing to do, and so is never measured
again."""
_HALF_AFTER_S = 60.0
"""After this many seconds of prefills, the earlier ones count half: the rate follows the engine's load."""
_WINDOW_S = 10.0
_KEPT = 0.9
"""A window with fewer tokens lowers the peak to this part of it at most: most windows are not full of work."""


@dataclass(slots=True)
class _Peak:
    """The most tokens per second in a window; older windows count less."""

    per_s: float = 0.0
    _since_s: float | None = None
    _tokens: float = 0.0

    def add(self, tokens: float, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
            return
        self._tokens += tokens
        if now_s - self._since_s >= _WINDOW_S:
            if self._tokens > 0:
                self.per_s = max(self._tokens / (now_s - self._since_s), _KEPT * self.per_s)
            self._since_s, self._tokens = now_s, 0.0


@dataclass(slots=True)
class _Ratio:
    """Tokens per second; older measurements count less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        if self.seconds > _HALF_AFTER_S:
            self.tokens, self.seconds = self.tokens / 2, self.seconds / 2
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    @property
    def per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None


@dataclass(slots=True)
class Rates:
    """One engine's speeds, as far as they are measured."""

    _seen: Mapping[str, float] = field(default_factory=dict)
    _prefill: _Ratio = field(default_factory=_Ratio)
    _cpu: _Ratio = field(default_factory=_Ratio)
    _peak: _Peak = field(default_factory=_Peak)
    _alone_per_s: float = 0.0
    """The fastest prefills: these had their steps to themselves."""
    _measured: float = 0
    """How many prefills told the speed."""

    def observe(self, counters: Mapping[str, float], now_s: float) -> None:
        """Take in the counters' current values."""
        grown = {name: value - self._seen.get(name, value) for name, value in counters.items()}
        self._seen = dict(counters)
        prefills, tokens = grown.get("prefills", 0), grown.get("prefill_computed_tokens", 0)
        if counters.get("transfers", 0) > 0:  # vLLM 0.33 counts prompts that others have computed, too
            prefills = tokens = 0
        if prefills > 0 and tokens >= _MIN_COMPUTED_TOKENS * prefills:
            self._prefill.add(tokens, seconds := grown.get("prefill_s", 0))
            if seconds > 0:
                self._measured += prefills
                self._alone_per_s = max(tokens / seconds, self._alone_per_s * 0.5 ** (seconds / _HALF_AFTER_S))
        self._peak.add(max(0.0, tokens), now_s)
        if grown.get("cpu_load_s", 0) > 0:
            self._cpu.add(grown.get("cpu_loaded_tokens", 0), grown["cpu_load_s"])

    def prefill_tokens_per_s(self) -> float | None:
        """How fast the engine computes prompts; None until a few were measured. Prefills that share a step each count
        its time, so the fastest of them count; what was computed in a window tells more if they always share. So
        engines of one kind measure about the same, whatever their load is."""
        return max(self._alone_per_s, self._peak.per_s) if self._measured >= _MIN_PREFILLS else None

    def cpu_credit(self, token_bytes: float | None) -> float | None:
        """The saving for a token in the replica's CPU memory; None until measured. `token_bytes` is its KV's size."""
        return self._saved(self._cpu.per_s or self._lmcache("l1_load_bytes_per_s", token_bytes))

    def store_credit(self, token_bytes: float | None) -> float | None:
        """The saving for a token that LMCache has in Redis; None until measured."""
        return self._saved(self._lmcache("l2_load_bytes_per_s", token_bytes))

    def _lmcache(self, name: str, token_bytes: float | None) -> float | None:
        bytes_per_s = self._seen.get(name)
        return bytes_per_s / token_bytes if bytes_per_s and token_bytes else None

    def _saved(self, load_per_s: float | None) -> float | None:
        """The part of a token's prefill time that a load saves."""
        prefill_per_s = self._prefill.per_s
        if load_per_s is None or prefill_per_s is None:
            return None
        return max(0.0, 1 - prefill_per_s / load_per_s)
