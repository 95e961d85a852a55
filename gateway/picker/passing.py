"""Answers that Envoy passes without showing them (`response_body_mode: NONE`): the picker sees their heads only.

So nothing of an answer can be changed or learned: its usage, its end, whether it was complete. Envoy's call ends with
the head, so that the answer outlives the picker. A stream's load is held for as long as its engine takes for an answer
of its usual length, and it is charged for the tokens of that time. Any other answer was generated when its head came.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import structlog

from gateway.errors import ApiError
from gateway.picker.call import CURRENT
from gateway.relay.attempt import Attempt, of_prefill
from gateway.relay.error_shapes import error_body
from gateway.relay.held import HeldBytes
from gateway.relay.prefill_legs import NoLeg, PrefillLeg
from gateway.relay.reply import Reply, passed_headers
from gateway.relay.retries import RETRIED_STATUSES, Failure
from gateway.relay.tries import Tries
from gateway.replicas.served import endpoint_in
from gateway.request.job import Job
from gateway.routing.questions import affinity_of
from gateway.routing.rendezvous import fallback_order
from gateway.routing.ticket import Ticket
from gateway.upstream import Answer, UpstreamError

_log = structlog.get_logger("kvgate.picker")
_OF_BODY = frozenset({b"content-type", b"content-encoding"})
_ASSUMED_TOKENS = 200.0
"""Of an answer, until an engine has told."""


class PassingAttempt(Attempt):
    """An attempt of a picker."""

    fallback_endpoints = 0
    """How many replicas the proxy may try itself."""

    async def _sent(
        self, job: Job, tries: Tries, reply: Reply, held: HeldBytes, leg: PrefillLeg | NoLeg
    ) -> Failure | None:
        call = CURRENT.get()
        if call is not None and not call.is_sent:
            call.others = self._others(job, tries, leg)
            call.on_served = partial(self._served, job, tries.ticket, reply)
        if call is None or call.is_sent or call.head.shows_answers:
            return await super()._sent(job, tries, reply, held, leg)
        if (kept := await self._kept_back(job, tries, leg.given)) is not None:
            return kept
        job = job._replace(is_usage_open=False, asks_ids=False)  # nobody takes out of the answer what these add
        ticket, answer = tries.ticket, None
        try:
            with (
                self._deadlines.within(self._first_byte_s if job.stream else None, reply.task) as limit,
                self._waiting(job, tries, limit) as waiting,
            ):
                leg.waits(waiting)
                answer = await self._send(job, ticket, leg.given)
                leg.taken()
            if answer.status in RETRIED_STATUSES:
                call.abort()
                return self._noted(ticket, of_prefill(ticket, _unread(job, answer)))
            await self._passed(job, tries, reply, answer, call.stops)
            return None
        except UpstreamError as error:
            return self._broke(job, ticket, answer, error)
        except TimeoutError:
            return self._timed_out(ticket, waiting)
        finally:
            if answer is not None:
                answer.close()

    def _others(self, job: Job, tries: Tries, leg: PrefillLeg | NoLeg) -> list[str]:
        """The URLs of other replicas that the proxy may try itself, in the order in which gateways do without Redis."""
        ticket, route = tries.ticket, job.route
        members = [self._fleet.members[name] for name in route.served.replicas if name in self._fleet.members]
        if job.has_effects or leg.given or any(each.dp_rank is not None for each in members):
            return []  # what it gets is for this replica alone
        order = fallback_order(ticket.pool.records, route.served.shared, route.pinned, affinity_of(job))
        left = [name for name in order if name != ticket.replica and name not in tries.replicas]
        return [route.served.replicas[name] for name in left[: self.fallback_endpoints]]

    def _served(self, job: Job, ticket: Ticket, reply: Reply, endpoint: str) -> None:
        """The proxy has sent it to another replica than it was told: what it holds moves there."""
        replicas = job.route.served.replicas
        name = next((name for name, url in replicas.items() if endpoint_in(url) == endpoint), "")
        if (record := ticket.pool.records.get(name)) is None:
            _log.warning("a proxy sent a request to an unknown endpoint", endpoint=endpoint, told=ticket.url)
            return
        ticket.moved(name, record.incarnation, replicas[name])
        reply.note(ticket, job.caller.sees_decisions)

    async def _passed(self, job: Job, tries: Tries, reply: Reply, answer: Answer, stops: asyncio.Event) -> None:
        """The answer passes. Holds its load for as long as it takes."""
        ticket = tries.ticket
        streamed = answer.status == HTTPStatus.OK and answer.is_event_stream
        if not streamed:
            ticket.answered_s = time.monotonic()
        self._taken(job, tries, answer, streamed, reply)
        if streamed:
            reply.start_stream(answer)
            if job.endpoint.computes_prompt:
                ticket.first_token()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._takes_s(job, ticket)):
                        await stops.wait()
        else:
            reply.start_body(answer, answer.content_length)
        if answer.status < HTTPStatus.BAD_REQUEST:
            self._charges.untold(job, ticket)
            self._failures.ended_well(ticket)
        reply.end()
        ticket.done()

    def _takes_s(self, job: Job, ticket: Ticket) -> float:
        """How long a stream's engine generates it, by what the engine has told of the answers before."""
        member = self._fleet.members.get(ticket.replica)
        figures = member.facts.figures if member is not None else {}
        answers = figures.get("first_tokens", 0)
        tokens = figures.get("generated_tokens", 0) / answers if answers else _ASSUMED_TOKENS
        if job.max_output_tokens is not None:
            tokens = min(tokens, job.max_output_tokens / job.choices)
        return tokens / self._charges.pace(job, ticket)


def _unread(job: Job, answer: Answer) -> Failure:
    """A failure whose body Envoy does not show. If no other replica answers, its client gets this one in its place."""
    message = f"The replica answered {answer.status}; its proxy does not show the rest (docs/picker.md, Two modes)."
    error = ApiError(answer.status, "replica_error", message)
    headers = [header for header in passed_headers(answer) if header[0] not in _OF_BODY]
    headers.append((b"content-type", b"application/json"))
    body = error_body(error, job.endpoint.api, job.id)
    return Failure(f"status_{answer.status}", answer.status, tuple(headers), body)
