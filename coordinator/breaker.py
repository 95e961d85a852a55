"""When a replica's breaker opens, and for how long. lua/report.lua has the rule; each gateway applies it to its own
attempts while the store is away."""

from __future__ import annotations

FAILURES = 3
"""Fewer do not open it: one may be the request's fault, and two that of one moment."""
ERROR_RATE = 0.5
"""The least share of failures among all known attempts: a replica that answers more often than not is of use."""
WINDOW_MS = 10_000
"""Attempts before that tell of another state. It is also the window of retries (gateway/relay/retry_budget.py)."""
OPEN_MS = 5000
"""Until a probe: an engine that crashed needs longer to come back, and one that was overloaded has a pause."""
