"""From a request's bytes to a Job: authenticated already, not placed yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from gateway.errors import ApiError, bad_field
from gateway.http.exchange import Exchange
from gateway.metrics.gateway_metrics import Metrics
from gateway.prompt import CacheScope, PromptLimits, Steps, TokenEstimator, TooManySteps
from gateway.replicas.fleet import Fleet
from gateway.request.admission import AdmissionSlot
from gateway.request.job import TRUSTED_FIELDS, Job, resolve_model, upstream_headers
from gateway.request.keyring import Caller, Keyring
from gateway.request.paths import PROMPT_PATHS, folded, is_denied, is_plain, may_have_effects, upstream_target
from gateway.request.reading import Ask, Body, Reading, Resolve, Rules, read_body
from gateway.request.reading.structure import StructureLimits, is_sparse
from gateway.request.reading.workers import Workers
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.policies import POLICIES

# What is larger, or takes more steps, another process reads: with these the event loop is held for 40 ms at the most.
# A sparse body (an image) is copied, not taken to pieces: it may be larger.
_INLINE_BYTES: Final = 2**18
_INLINE_SPARSE_BYTES: Final = 2**22
_INLINE_STEPS: Final = 3000
# What a worker takes to read a body, at the most, its answer included: see docs/adr/0011-reading.md.
_COPIES: Final = 3
_PARSED_BYTES_PER_BYTE: Final = 10
_MAX_PARSED_BYTES: Final = 200 * 2**20
_TURN_S: Final = 60.0


class Reader:
    """Reads requests; keeps, per pool, what was learned of its tokenizer."""

    def __init__(self, settings: GatewaySettings, keyring: Keyring, fleet: Fleet, metrics: Metrics) -> None:
        security, limits = settings.security, settings.limits
        self._keyring = keyring
        self._fleet = fleet
        self._policy = settings.policy
        self._pass_authorization = not security.api_keys and security.replica_api_key is None
        self._denied = tuple(folded(path) for path in security.denied_paths)
        self._allowed = frozenset(path for path in PROMPT_PATHS if not is_denied(path, self._denied))
        removed = TRUSTED_FIELDS if security.allow_priority else (*TRUSTED_FIELDS, "priority")
        self._rules = Rules(
            removed,
            # A form gets no salt of its tenant's; then it shall have none at all.
            (*removed, "cache_salt") if security.api_keys else removed,
            PromptLimits(
                limits.max_image_pixels, tuple(security.image_hosts), limits.max_messages, limits.max_content_parts
            ),
            StructureLimits(limits.max_fields, limits.max_elements, limits.max_nesting),
            limits.max_form_parts,
        )
        self._workers = Workers(self._rules)
        self._max_buffered_bytes = limits.max_buffered_bytes
        self._metrics = metrics
        self._estimators: dict[str, TokenEstimator] = {}

    def estimator(self, pool: str) -> TokenEstimator:
        estimator = self._estimators.get(pool)
        if estimator is None:
            estimator = self._estimators[pool] = TokenEstimator()
        return estimator

    async def close(self) -> None:
        await self._workers.close()

    def refuse_denied(self, path: str) -> None:
        """Raises a 404 for the paths that must never reach a replica."""
        if path not in self._allowed and (is_denied(path, self._denied) or not is_plain(path)):
            raise ApiError(404, "path_not_allowed", f"{path} is not available through this gateway.")

    async def read(self, exchange: Exchange, request_id: str, caller: Caller, place: AdmissionSlot, body: Body) -> Job:
        """Read one request; a large one in another process, so that nobody else's tokens wait for it. Raises ApiError
        naming the field that is wrong."""
        headers = exchange.headers
        ask = Ask(exchange.path, headers.get("content-type", ""))
        _check_kind(exchange.method, ask, has_body=bool(body))
        policy = self.policy(headers)
        passed = upstream_headers(headers, request_id, pass_authorization=self._pass_authorization)
        if body and not ask.is_form:
            passed["content-type"] = "application/json"  # by whatever name it came: engines know this one only
        target = upstream_target(exchange.path, exchange.query)
        job = Job(request_id, exchange.method, exchange.path, target, caller, policy, passed)
        await self.fill(job, ask, place, body)
        return job

    async def fill(self, job: Job, ask: Ask, place: AdmissionSlot, body: Body) -> None:
        """Read the body, and what the replica gets of it, into `job`."""

        def resolve(path: str, model: str | None, cache_salt: str | None) -> CacheScope:
            job.served = resolve_model(self._fleet, model, path)
            return CacheScope(
                job.served.root_model, job.served.adapter, self._keyring.cache_salt(job.caller, cache_salt)
            )

        reading = self._read_here(ask, body, resolve)
        if reading is None:
            self._metrics.worker_reads.inc()
            reading = await self._read_by_a_worker(ask, body, place, resolve)
        job.body = body if reading.body is None else reading.body
        place.hold_only(len(job.body))
        self._take(job, reading)

    def _read_here(self, ask: Ask, body: Body, resolve: Resolve) -> Reading | None:
        """Read a body at once; None where that would hold the event loop for too long."""
        if len(body) > _INLINE_BYTES and (len(body) > _INLINE_SPARSE_BYTES or ask.is_form or not is_sparse(body)):
            return None
        try:
            return read_body(ask, body, self._rules, resolve, Steps(_INLINE_STEPS))
        except TooManySteps:
            return None

    async def _read_by_a_worker(self, ask: Ask, body: Body, place: AdmissionSlot, resolve: Resolve) -> Reading:
        """Wait for a turn, and for the reading. Raises a 429 where that is too long, or takes too much memory."""
        parsed_bytes = 0 if ask.is_form else min(_PARSED_BYTES_PER_BYTE * len(body), _MAX_PARSED_BYTES)
        # However little a gateway may hold, one body that it takes it also reads.
        reading_bytes = min(_COPIES * len(body) + parsed_bytes, self._max_buffered_bytes // 2)
        try:
            async with asyncio.timeout(_TURN_S) as waiting, self._workers.turns.of(place.holder):
                waiting.reschedule(None)
                with place.holding(reading_bytes):
                    return await self._workers.read(ask, body, resolve)
        except TimeoutError:
            message = f"body: too many large ones are read before it; it has waited for {_TURN_S:g} s. Retry shortly."
            raise ApiError(429, "gateway_overloaded", message, "body", {"retry-after": "1"}) from None

    def _take(self, job: Job, reading: Reading) -> None:
        job.path, job.model = reading.path, reading.model
        job.stream, job.strip_usage = reading.stream, reading.strip_usage
        job.wants_token_ids, job.reads_cache = reading.wants_token_ids, reading.reads_cache
        job.previous_response_id = reading.previous_response_id
        job.has_effects = reading.has_effects or may_have_effects(job.method, job.path)
        job.prompt, job.is_batch = reading.prompt, reading.is_batch
        if job.prompt is not None and job.prompt.keys:
            job.tokens = self.estimator(job.served.pool).estimate(job.prompt)
            job.prompt_tokens = job.tokens[-1]
            if not job.is_batch:  # the engine's events name it, which tells this prompt's blocks
                job.headers["x-session-id"] = job.prompt.keys[-1]

    def policy(self, headers: Mapping[str, str]) -> str:
        """The policy by configuration, or by header where that is allowed."""
        wanted = headers.get("x-kvgate-policy")
        if wanted is None:
            return self._policy.name
        if not self._policy.allow_header:
            raise ApiError(
                403, "policy_header_not_allowed", "x-kvgate-policy: not allowed here (policy.allow_header is false)."
            )
        if wanted not in POLICIES:
            raise bad_field("x-kvgate-policy", f"must be one of {', '.join(POLICIES)}.")
        return wanted


def _check_kind(method: str, ask: Ask, has_body: bool) -> None:
    """Raises a 405 where a prompt comes by another method than POST, a 415 for a body that is neither JSON nor a form:
    a web page of another origin may send such a one without asking."""
    if ask.path in PROMPT_PATHS and method != "POST":
        raise ApiError(405, "method_not_allowed", f"{ask.path} takes POST.", headers={"allow": "POST"})
    if ask.content_type == "application/json":
        return
    media_type = ask.content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (media_type[:12] == "application/" and media_type[-5:] == "+json")
    if has_body and not is_json and not ask.is_form:
        raise ApiError(
            415,
            "unsupported_media_type",
            f"content-type: is {media_type[:100] or 'missing'}; send application/json (curl: -H 'content-type: "
            "application/json'), or multipart/form-data where a form is uploaded.",
            "content-type",
        )
