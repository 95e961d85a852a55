"""When a replica's breaker opens, and for how long. lua/report.lua has the rule; each gateway applies it to its own
attempts while the store is away."""

from __future__ import annotations

FAILURES = 3
"""Fewer failures do not open it. A single failure may be the request's fault."""
ERROR_RATE = 0.5
"""The least share of failures among all known attempts. A replica that answers most requests is still of use."""
WINDOW_MS = 10_000
"""Older attempts do not count. A longer window would punish a replica that has recovered."""
OPEN_MS = 5000
"""The time until a probe. It doubles with each failed probe, so a crashed engine costs few requests."""
