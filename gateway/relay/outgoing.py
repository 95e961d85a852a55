"""What a replica gets of a request: its headers and its body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from coordinator.placement import Placement
from gateway.relay.token_ids import ASK
from gateway.replicas.fleet import Fleet
from gateway.replicas.told_role import REFUSED, parse_role
from gateway.request.job import Job
from gateway.request.paths import with_model_in_query
from gateway.request.reading.document import with_fields
from gateway.request.reading.form import is_form
from gateway.request.reading.model_field import model_span
from gateway.routing.tenants import Tenants
from gateway.routing.ticket import Ticket
from gateway.settings.base import Role
from gateway.upstream import Buffer

NOTHING_GIVEN: Final[Mapping[str, Any]] = MappingProxyType({})


class Outgoing:
    """Writes requests to replicas. `given` are fields that the gateway adds for this attempt alone."""

    def __init__(self, fleet: Fleet, tenants: Tenants) -> None:
        self._fleet = fleet
        self._tenants = tenants

    def headers(self, job: Job, ticket: Ticket, role: Role = "decode") -> dict[str, str]:
        """Those for any replica, and those that mean something to this one only. `role`: what it is asked as."""
        headers = headers_of(job)
        if tip := _tip_of(job):
            headers["x-session-id"] = tip
        member = self._fleet.members.get(ticket.replica)
        rank = member.facts.header_rank(member.dp_rank) if member is not None and member.dp_rank is not None else None
        if rank is not None:
            headers["x-data-parallel-rank"] = str(rank)
        if member is not None and member.told_role is not None:
            headers |= member.told_role.headers(role)
        tenant = job.caller.tenant
        priority = self._tenants.engine_priority(tenant, job.priority) if job.endpoint.takes_priority else None
        if priority is not None:  # 0, too: a body may name another one
            headers["x-vllm-priority"] = str(priority)
        return headers

    def has_switched(self, job: Job, ticket: Ticket, status: int, body: bytes) -> bool:
        """Whether the replica refused the request because it has another role now, or is about to. Then it can go
        elsewhere at once: the refusal tells the role, and nothing of the request was executed."""
        told, member = parse_role(body) if status == REFUSED else None, self._fleet.members.get(ticket.replica)
        if told is None or member is None:
            return False
        self._fleet.learn_role(member, told)
        job.route.renew(self._fleet)
        return True

    def lacks_prefill(self, job: Job, ticket: Ticket, given: Mapping[str, Any]) -> bool:
        """Whether the replica would refuse the request because nobody has computed its prompt."""
        member = self._fleet.members.get(ticket.replica)
        return not given and job.endpoint.computes_prompt and member is not None and member.is_decode_only

    def target(self, job: Job, ticket: Ticket) -> str:
        """Path and query, with the model's name at the replica if the query names the model."""
        return with_model_in_query(job.target, ticket.other_name) if ticket.other_name and not job.body else job.target

    def body(self, job: Job, ticket: Ticket, given: Mapping[str, Any] = NOTHING_GIVEN) -> Sequence[Buffer]:
        """The body gains fields if the replica's agent must learn which blocks the prompt uses, or if the gateway asks
        for the usage of a stream whose client says nothing of it. It names the model as the replica does."""
        asked: dict[str, Any] = {**given}
        if job.is_usage_open and not ticket.shows_usage:  # which it learns, also if it is asked once more
            asks = self._fleet.asks_usage(ticket.replica)
            ticket.asks_usage, ticket.shows_usage = asks is True, asks is None
            if asks:
                asked["stream_options"] = {"include_usage": True}
        if ticket.placement is not None and not job.is_batch:
            asked |= asks_report(job, ticket.placement)
            if _must_tell_ids(job, ticket.placement):
                ticket.asks_ids = True
        ticket.asks_ids = ticket.asks_ids or (job.asks_ids and self._fleet.tells_ids(ticket.replica))
        if ticket.asks_ids and not job.wants_token_ids:
            asked |= ASK
        body = with_fields(job.body, asked) if asked else (job.body,)
        return _with_model(job, body, ticket.other_name) if ticket.other_name and job.body else body


def headers_of(job: Job) -> dict[str, str]:
    """The headers that any replica gets, with the trace of the attempt that runs now."""
    headers, traced = dict(job.headers), job.route.trace_headers
    if traced is not None:
        headers.pop("tracestate", None)  # a client's state without its trace says nothing
        headers |= traced
    return headers


def _tip_of(job: Job) -> str:
    """The last key of the prompt's chain, if it names the request to its replica: the engine's events repeat it, which
    shows the prompt's blocks. Not of several prompts, and not of the rest of a stream, whose prompt has the answer's
    tokens, too."""
    prompt = job.route.prompt
    return "" if prompt is None or not prompt.keys or job.is_batch or job.route.stays else prompt.keys[-1]


def asks_report(job: Job, placement: Placement) -> dict[str, Any]:
    """The field that has the engine report the blocks that it reuses; nothing if its agent needs no report."""
    return {"vllm_xargs": {"kv_cache_report_mode": "full"}} if placement.report and _tip_of(job) else {}


def _must_tell_ids(job: Job, placement: Placement) -> bool:
    """Whether the replica's agent follows an engine by the token ids of prompts, and of this one."""
    return placement.mode == "token_ids" and bool(placement.claimed_from) and job.endpoint.returns_token_ids


def _with_model(job: Job, body: Sequence[Buffer], name: str) -> Sequence[Buffer]:
    """The body, whose first piece has the model, with another name for it."""
    begin, end = job.model_at or model_span(job.body)  # small, or a worker would have looked
    first = memoryview(body[0])
    written = name.encode() if is_form(job.headers["content-type"]) else orjson.dumps(name)
    return first[:begin], written, first[end:], *body[1:]
