"""Whether the machines' clocks agree, and whether Redis' clock goes back."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import FindingKind, Result, Unchecked
from gateway.doctor.evidence import Evidence, Unknown

_TOLERATED_S = 2.0
_STEP_IS_TOLD_MS = 3_600_000

SKEW = FindingKind(
    "clock-skew",
    "warning",
    "placements and leases use Redis' clock only; but logs, and the ends of API keys, go by a gateway's own clock",
    "run NTP on this host and on that of Redis: timedatectl set-ntp true",
)
STEPPED = FindingKind(
    "redis-clock-stepped",
    "warning",
    "KVGate moves leases and breakers back as well, and treats last uses in the future as uses now: it trims the "
    "replicas without agents by guess",
    "let NTP slew, not step, the clocks of all hosts on which Redis runs or may run after a failover: chronyc tracking",
)


def clocks(evidence: Evidence) -> Iterator[Result]:
    """Whether this machine's clock agrees with Redis'."""
    if isinstance(evidence.redis, Unknown):
        yield Unchecked(
            "clocks", "whether they agree", "they are compared with Redis' clock, and Redis does not answer"
        )
        return
    least_s, most_s = evidence.redis.clock_ahead_s
    off_s = max(least_s, -most_s)
    if off_s > _TOLERATED_S:
        what = f"its clock is {off_s:.0f} s or more {'behind' if least_s > 0 else 'ahead of'} that of Redis"
        yield SKEW.seen("this machine", what)


def steps(evidence: Evidence) -> Iterator[Result]:
    """Whether Redis' clock went back, for example after a failover to a host whose clock is behind."""
    for pool in evidence.pools:
        for snapshot in pool.snapshots[-1:]:
            at_ms, by_ms = snapshot.went_back
            ago_ms, ahead_ms = snapshot.state.now_ms - at_ms, snapshot.tick_ms - snapshot.state.now_ms
            if by_ms and ago_ms < _STEP_IS_TOLD_MS:
                when = f"{ago_ms // 60_000} min ago" if ago_ms >= 0 else "at a time in the future"
                yield STEPPED.seen("Redis", f"its clock went back by {by_ms / 1000:.0f} s, {when}")
            elif ahead_ms > _TOLERATED_S * 1000:
                what = f"the last heartbeat in {pool.subject} lies {ahead_ms / 1000:.0f} s in its future"
                yield STEPPED.seen("Redis", what)


CHECKS = (clocks, steps)
