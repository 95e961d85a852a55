"""What became of each request, for the access log and for those who watch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gateway.endpoints import Endpoint
from gateway.http.exchange import Exchange
from gateway.relay.reply import Reply
from gateway.request.keyring import Caller
from gateway.routing.ticket import Ticket

_OF_PLACEMENT = (
    *(
        "replica",
        "policy",
        "why",
        "state",
        "matched_tokens",
        "passed_over_tokens",
        "waited_ms",
        "late",
        "hedged",
        "prefill",
        "unpaired",
        "costs",
    ),
)
_COST_FIELDS = (
    *("replica", "active_requests", "backlog_tokens", "matched_tokens"),
    *("charged_tokens", "displaced_tokens", "load_tokens", "cost", "speed"),
)
"""Of a candidate, in the order in which lua/steps/costs.lua tells them."""


class Recorder:
    """Makes the record of each request of one gateway, and gives it to `sinks` and to the request's trace. If nobody
    wants it, it makes none."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self.sinks: list[Callable[[dict[str, Any]], None]] = []

    def __repr__(self) -> str:
        return f"<Recorder {len(self.sinks)} sinks>"

    def note(
        self, exchange: Exchange, endpoint: Endpoint, reply: Reply, caller: Caller | None, duration_s: float
    ) -> None:
        """A request is over."""
        if not self.sinks and not reply.trace.is_traced:
            return
        record = request_record(self._gateway, exchange, endpoint, reply, caller, duration_s)
        for sink in self.sinks:
            sink(record)
        reply.trace.end(endpoint.prompt, record)


def request_record(
    gateway: str, exchange: Exchange, endpoint: Endpoint, reply: Reply, caller: Caller | None, duration_s: float
) -> dict[str, Any]:
    """All fields are there in each record; those that are not known are null. Times are in milliseconds; `time` is that
    of the end. Paths that clients can invent are `other`. `prompt_tokens` is an estimate unless the engine has told.
    `costs`, of each replica that was looked at, are known of a part of requests (`decisions.cost_share`), of traced
    ones, and of all while somebody watches."""
    record = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "gateway": gateway,
        "request_id": reply.request_id,
        "method": exchange.method,
        "path": endpoint.label,
        "status": reply.status,
        "code": reply.code or None,
        "over_budget": reply.over_budget,
        "tenant": caller.tenant if caller is not None else None,
        "key": (caller.key if caller is not None else "") or None,
        "duration_ms": _ms(duration_s),
        "first_byte_ms": None if reply.first_byte_s is None else _ms(reply.first_byte_s),
    }
    return record | _of_job(reply) | _of_placement(reply)


def _of_job(reply: Reply) -> dict[str, Any]:
    job, usage = reply.job, reply.usage
    prompt_tokens = job.prompt_tokens if job is not None and job.route.prompt is not None else None
    return {
        "model": job.model if job is not None else None,
        "served_model": (reply.tickets[-1].other_name or job.model) if job is not None and reply.tickets else None,
        "placed_as": job.route.counts_as if job is not None else None,
        "backend": (job.route.option or None) if job is not None else None,
        "stream": job.stream if job is not None else None,
        "prompt_tokens": usage.prompt_tokens if usage is not None else prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "output_tokens": usage.output_tokens if usage is not None else None,
        "resumed": reply.resumed,
    }


def _of_placement(reply: Reply) -> dict[str, Any]:
    """Of the last attempt."""
    if not reply.tickets:
        return {"attempts": 0, "failed": []} | dict.fromkeys(_OF_PLACEMENT)
    ticket = reply.tickets[-1]
    return {
        "attempts": len(reply.tickets),
        "failed": [
            {"replica": each.replica, "why": each.failure}
            for attempt in reply.tickets
            for each in (attempt.prefill, attempt)
            if each is not None and each.failure
        ],
        "replica": ticket.replica,
        "policy": ticket.request.knobs.name,
        "why": ticket.why,
        "state": ticket.state,
        "matched_tokens": ticket.matched_tokens,
        "passed_over_tokens": ticket.placement.passed_over_tokens if ticket.placement is not None else None,
        "waited_ms": _ms(ticket.request.waited_s),
        "late": ticket.late or None,
        "hedged": ticket.hedged or None,
        "prefill": ticket.prefilled_by or None,
        "unpaired": ticket.unpaired or None,
        "costs": _costs(ticket),
    }


def _costs(ticket: Ticket) -> list[dict[str, Any]] | None:
    if ticket.placement is None or not ticket.placement.costs:
        return None
    rows = zip(*ticket.placement.costs, strict=False)
    return [{name: _value(name, told) for name, told in zip(_COST_FIELDS, row, strict=False)} for row in rows]


def _value(name: str, told: Any) -> Any:
    """A grant is JSON, with text and fractions."""
    if name == "replica":
        return told.decode("utf-8", "replace") if isinstance(told, bytes) else told
    return float(told) if name == "speed" else int(told)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
