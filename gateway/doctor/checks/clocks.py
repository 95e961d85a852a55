"""Whether the machines' clocks agree, and whether Redis' clock goes back."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import FindingKind, Result, Unchecked
from gateway.doctor.evidence import Evidence, Span, Unknown

_TOLERATED_S = 2.0
_STEP_IS_TOLD_MS = 3_600_000

SKEW = FindingKind(
    "clock-skew",
    "warning",
    "placements and leases use Redis' clock only; but logs, kvgate_engine_event_delay_seconds and the start times by "
    "which KVGate recognizes an engine's restarts do not agree",
    "run NTP on that host: timedatectl set-ntp true",
)
STEPPED = FindingKind(
    "redis-clock-stepped",
    "warning",
    "KVGate moves leases and breakers back as well, and treats last uses in the future as uses now: it trims the "
    "replicas without agents by guess",
    "let NTP slew, not step, the clocks of all hosts on which Redis runs or may run after a failover: chronyc tracking",
)


def clocks(evidence: Evidence) -> Iterator[Result]:
    """Whether this machine's and the replicas' clocks agree with Redis'."""
    if isinstance(evidence.redis, Unknown):
        yield Unchecked(
            "clocks", "whether they agree", "they are compared with Redis' clock, and Redis does not answer"
        )
        return
    redis_s = evidence.redis.clock_ahead_s
    here_s = (-redis_s[1], -redis_s[0])
    if _certainly_off_s(here_s):
        yield SKEW.seen("this machine", _words(here_s))
    for replica in evidence.replicas():
        if replica.clock_ahead_s is None:
            if replica.answers:
                yield Unchecked(replica.subject, "its clock", "it answers without a Date header")
            continue
        ahead_s = (replica.clock_ahead_s[0] - redis_s[1], replica.clock_ahead_s[1] - redis_s[0])
        if _certainly_off_s(ahead_s):
            yield SKEW.seen(replica.subject, _words(ahead_s))


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


def _certainly_off_s(ahead_s: Span) -> float:
    """By how much the clock is off at least; 0 if that may be within the tolerance."""
    nearest_s = ahead_s[0] if ahead_s[0] > 0 else -ahead_s[1]
    return nearest_s if nearest_s > _TOLERATED_S else 0.0


def _words(ahead_s: Span) -> str:
    off_s = _certainly_off_s(ahead_s)
    return f"its clock is {off_s:.0f} s or more {'ahead of' if ahead_s[0] > 0 else 'behind'} that of Redis"
