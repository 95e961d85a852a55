"""What a tenant with tokens_per_min may have used by any moment. No I/O.

A bucket holds what a minute allows, and this comes back evenly. A request is let in while a token is left, and takes
its estimated tokens. When it ends, the estimate is corrected. So after a request was let in, all that were let in until
then use no more than

    the limit x minutes + one minute's burst
    + the tokens of this request, because it may overdraw the bucket
    + the tokens by which those that were running took more than their estimates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """One answered request. Times are seconds since the first request was sent."""

    sent_s: float
    ended_s: float
    used_tokens: int
    estimated_tokens: int | None
    """What was reserved for it; None if nobody saw this."""

    @property
    def error_tokens(self) -> int:
        """What it took beyond its estimate."""
        return 0 if self.estimated_tokens is None else max(0, self.used_tokens - self.estimated_tokens)


def used_tokens(taken: Sequence[Taken], at_s: float) -> int:
    """What requests that ended by then took."""
    return sum(each.used_tokens for each in taken if each.ended_s <= at_s)


def overdraft_tokens(taken: Sequence[Taken], at_s: float) -> int:
    """What may be used by then beyond the limit and the burst."""
    last = max((each for each in taken if each.sent_s <= at_s), key=lambda each: each.sent_s, default=None)
    if last is None:
        return 0
    beside = (each for each in taken if each is not last and each.sent_s <= last.sent_s < each.ended_s)
    return last.used_tokens + sum(each.error_tokens for each in beside)


def allowed_tokens(taken: Sequence[Taken], tokens_per_min: int, at_s: float) -> float:
    """What may be used by then."""
    return tokens_per_min * (1 + at_s / 60) + overdraft_tokens(taken, at_s)


def least_left_tokens(taken: Sequence[Taken], tokens_per_min: int) -> float:
    """What was left at the moment at which the least was left; below 0 if the limit was broken."""
    moments = [each.ended_s for each in taken]
    left = (allowed_tokens(taken, tokens_per_min, at_s) - used_tokens(taken, at_s) for at_s in moments)
    return min(left, default=float(tokens_per_min))
