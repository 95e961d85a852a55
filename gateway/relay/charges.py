"""What a request takes of its tenant's share and limits: what the engine did for it.

Most answers end with the engine's own usage. Others end without: the client leaves, the request's time is over, the
gateway stops, or the API tells no tokens. Then the tokens are counted in this order:

- those that the engine told on the way (`continuous_usage_stats`), and the parts of a stream that have come;
- if the time was enough for many more, or if the answer is no stream, those that an engine generates in that time. A
  stream shows fewer parts than tokens if a part has several, if a parser collects them, if reasoning is hidden, or if
  its client does not read. The engine generates all the same.

It is never less than was seen, and never more than the request's own limit. A replica that dies or hangs is no reason
to pay for more than was seen. A response in the background is generated when nobody listens any more: without usage, it
counts as long as it may be.

A bill is stricter than a limit: cached tokens are cheaper only if the engine has told that it had them.
"""

from __future__ import annotations

import time

from gateway.billing.prices import TokenCounts
from gateway.relay.audit import Usage
from gateway.replicas.fleet import Fleet
from gateway.request.job import Job
from gateway.routing.tenants import Tenants
from gateway.routing.ticket import Ticket

_ASSUMED_TOKENS_PER_S = 50.0
"""Of one sequence, until an engine or an answer has told."""
_NEWEST = 0.1
"""The part of the newest answer in the average."""
_LEAST_TOKENS = 16
"""An answer with fewer tokens in a choice tells little of the pace."""
_LEARNS_EACH_S = 0.05
_HIDDEN = 1.5
"""A pace that makes so many times the tokens that were seen is believed. Below, the two differ by chance."""
_SHARED_STEPS = 2.0
"""Engines compute prompts faster than they say: if prefills share a step, its time counts for each of them."""


class Charges:
    """Sets what tickets have `used`, and the `tokens` that are billed."""

    def __init__(self, tenants: Tenants, fleet: Fleet) -> None:
        self._tenants = tenants
        self._fleet = fleet
        self._tokens_per_s: dict[str, float] = {}
        """By pool: the pace of its answers, where engines do not tell theirs."""
        self._learns_at_s = 0.0
        """When to learn from an answer again (monotonic clock)."""

    def told(self, job: Job, ticket: Ticket, usage: Usage) -> None:
        """The engine has told what the answer took."""
        if ticket.prefill_cached_tokens is not None:  # what the other replica had not is no saving
            usage = usage._replace(cached_tokens=min(usage.cached_tokens or 0, ticket.prefill_cached_tokens))
        cached_tokens = ticket.matched_tokens if usage.cached_tokens is None else usage.cached_tokens
        uncached_tokens = usage.prompt_tokens - cached_tokens
        ticket.used = self._tenants.used(job.caller.tenant, uncached_tokens, usage.output_tokens)
        proven_tokens = min(usage.cached_tokens or 0, usage.prompt_tokens)
        ticket.tokens = TokenCounts(usage.prompt_tokens - proven_tokens, proven_tokens, usage.output_tokens)
        if ticket.answered_s > self._learns_at_s and usage.output_tokens >= _LEAST_TOKENS * job.choices:
            self._learn_pace(job, ticket, usage.output_tokens, uncached_tokens)

    def _learn_pace(self, job: Job, ticket: Ticket, output_tokens: int, uncached_tokens: int) -> None:
        """A few answers a second are enough to know the pace of engines that do not tell theirs."""
        self._learns_at_s = ticket.answered_s + _LEARNS_EACH_S
        if not self._engines_pace(ticket):
            seconds, pool = job.choices * self._waited_s(job, ticket, uncached_tokens), job.route.served.pool
            if seconds > 0:
                pace = output_tokens / seconds
                mean = self._tokens_per_s.get(pool, pace)
                self._tokens_per_s[pool] = mean + _NEWEST * (pace - mean)

    def untold(self, job: Job, ticket: Ticket, *, by_time: bool = True) -> None:
        """The answer has ended without usage. Does nothing if it is known what it took. `by_time`: the engine was
        generating until now."""
        began = ticket if ticket.sent_s or ticket.prefill is None else ticket.prefill  # its client left meanwhile
        if ticket.used is not None or not began.sent_s or not job.endpoint.computes_prompt:
            return
        by_time = by_time and began is ticket
        uncached_tokens = max(0, job.prompt_tokens - ticket.matched_tokens)
        record = ticket.pool.records.get(ticket.replica)
        by_pace = 0
        if by_time and job.endpoint.output_limits and (record is None or record.state not in ("dead", "hung")):
            by_pace = round(self.pace(job, ticket) * self._generated_s(job, ticket, uncached_tokens))
        seen_tokens = ticket.seen_tokens()
        tokens = generated_tokens(seen_tokens, by_pace, job.max_output_tokens)
        if job.is_background:
            tokens = max(tokens, job.max_output_tokens or self._tenants.long_answer_tokens(job.caller.tenant))
        computed_tokens = job.prompt_tokens
        if not began.is_computed and not seen_tokens and (rate := self._prefill_tokens_per_s(began)):
            computed_tokens = min(computed_tokens, round(rate * (time.monotonic() - began.sent_s)))
        ticket.used = self._tenants.used_so_far(min(uncached_tokens, computed_tokens), tokens)
        ticket.tokens = TokenCounts(computed_tokens, 0, tokens)

    def pace(self, job: Job, ticket: Ticket) -> float:
        """How many tokens of one sequence its engine generates in a second, as far as anybody knows."""
        return self._engines_pace(ticket) or self._tokens_per_s.get(job.route.served.pool, _ASSUMED_TOKENS_PER_S)

    def _engines_pace(self, ticket: Ticket) -> float:
        member = self._fleet.members.get(ticket.replica)
        return member.tokens_per_s if member is not None else 0.0

    def _prefill_tokens_per_s(self, ticket: Ticket) -> float:
        return _SHARED_STEPS * (ticket.pool.prefills.tokens_per_s(ticket.replica) or 0.0)

    def _generated_s(self, job: Job, ticket: Ticket, uncached_tokens: int) -> float:
        """For how long the engine has generated, summed over choices. A stream's first event comes with its first
        token."""
        if ticket.first_token_s:
            running = max(0, job.choices - ticket.ended_choices)
            return ticket.ended_choices_s + running * (time.monotonic() - ticket.first_token_s)
        return 0.0 if job.stream else job.choices * self._waited_s(job, ticket, uncached_tokens)

    def _waited_s(self, job: Job, ticket: Ticket, uncached_tokens: int) -> float:
        """For how long an answer that is no stream was generated, without its prompt's time as far as it is known."""
        rate = self._prefill_tokens_per_s(ticket)
        prefill_s = uncached_tokens / rate if rate else 0.0
        return max(0.0, (ticket.answered_s or time.monotonic()) - ticket.sent_s - prefill_s)


def generated_tokens(seen: int, by_pace: int, limit: int | None) -> int:
    """The tokens of an answer that has told `seen` of them, while engines generate `by_pace`. Pure."""
    likely = by_pace if by_pace > _HIDDEN * seen else seen
    return max(seen, likely if limit is None else min(likely, limit))
