"""A client's request: what the gateway knows of it (`Job`), and how it reads that (`Reader`).

A request is authenticated when it is read, and not placed yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.endpoints import ENDPOINTS, Endpoint, endpoint_of
from gateway.errors import ApiError, bad_field
from gateway.http.exchange import Exchange
from gateway.metrics.gateway_metrics import Metrics
from gateway.prompt import CacheScope, Prompt, PromptLimits, Steps, TokenEstimator, TooManySteps
from gateway.replicas.fleet import Fleet, Served
from gateway.request.admission import AdmissionSlot
from gateway.request.keyring import Caller, Keyring
from gateway.request.paths import (
    folded,
    is_denied,
    is_plain,
    may_have_effects,
    stored_response,
    upstream_target,
)
from gateway.request.reading import Ask, Body, Reading, Resolve, Rules, read_body
from gateway.request.reading.structure import StructureLimits, is_sparse
from gateway.request.reading.workers import Workers
from gateway.settings.gateway_settings import GatewaySettings

POLICIES = ("prefix_kv_aware", "round_robin", "random", "least_loaded", "power_of_two", "consistent_hash")
TRUSTED_FIELDS = ("session_id", "request_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params")
"""Body fields by which a client could act on the engine past the gateway (source: vLLM's request schema)."""

_PASSED_HEADERS = ("accept", "traceparent", "tracestate", "anthropic-version", "anthropic-beta", "openai-beta")
# Another process reads a body that is larger or takes more steps. These limits hold the event loop for 40 ms at most.
# A sparse body (an image) is copied, not taken to pieces, so it may be larger.
_INLINE_BYTES: Final = 2**18
_INLINE_SPARSE_BYTES: Final = 2**22
_INLINE_STEPS: Final = 3000
# The memory that a worker takes at most to read a body, its answer included: see docs/adr/0011-reading.md.
_COPIES: Final = 3
_PARSED_BYTES_PER_BYTE: Final = 10
_MAX_PARSED_BYTES: Final = 200 * 2**20
_TURN_S: Final = 60.0


@dataclass(slots=True)
class Job:
    """One client request, ready to be placed and sent."""

    id: str
    method: str
    path: str
    """As the client sent it, decoded, without a slash at its end."""
    endpoint: Endpoint
    target: str
    """Path and query, as sent upstream."""
    caller: Caller
    policy: str
    headers: dict[str, str]
    """As sent upstream."""
    served: Served = field(init=False)
    model: str | None = None
    """As the client named it."""
    body: Body = b""
    """As sent upstream."""
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    """Estimated prompt tokens up to each prefix key, shallow to deep."""
    prompt_tokens: int = 0
    """The last of `tokens`; 0 without a prompt."""
    stream: bool = False
    strip_usage: bool = False
    """Whether the gateway asked for the usage chunk, and the client did not."""
    is_batch: bool = False
    """Several prompts in one request: the engine's usage is their sum."""
    reads_cache: bool = True
    """False where the engine must compute every prompt token, because the client wants its logprob."""
    wants_token_ids: bool = False
    """Whether the client asked for token ids itself."""
    pinned: str = ""
    """The only replica that can serve it; empty for any."""
    previous_response_id: str = ""
    response_noted: bool = False
    has_effects: bool = False
    """Whether it may do more than compute its answer. After it was sent once, no other replica gets it."""


class Reader:
    """Reads requests. Keeps, for each pool, what it learned of the pool's tokenizer."""

    def __init__(self, settings: GatewaySettings, keyring: Keyring, fleet: Fleet, metrics: Metrics) -> None:
        security, limits = settings.security, settings.limits
        self._keyring = keyring
        self._fleet = fleet
        self._policy = settings.policy
        self._pass_authorization = not security.api_keys and security.replica_api_key is None
        self._denied = tuple(folded(path) for path in security.denied_paths)
        self._allowed = frozenset(path for path in ENDPOINTS if not is_denied(path, self._denied))
        removed = TRUSTED_FIELDS if security.allow_priority else (*TRUSTED_FIELDS, "priority")
        self._rules = Rules(
            removed,
            # The gateway adds no tenant's salt to a form, so a form may have none at all.
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
        """Raises a 404 for a path that must not reach a replica."""
        if path not in self._allowed and (is_denied(path, self._denied) or not is_plain(path)):
            raise ApiError(404, "path_not_allowed", f"{path} is not available through this gateway.")

    async def read(self, exchange: Exchange, request_id: str, caller: Caller, slot: AdmissionSlot, body: Body) -> Job:
        """Reads one request. A worker process reads a large one, so that other requests' tokens are not delayed.
        Raises ApiError naming the field that is wrong."""
        headers = exchange.headers
        ask = Ask(exchange.path, headers.get("content-type", ""))
        _check_kind(exchange.method, ask, has_body=bool(body))
        policy = self.policy(headers)
        passed = upstream_headers(headers, request_id, pass_authorization=self._pass_authorization)
        if body and not ask.is_form:
            passed["content-type"] = "application/json"  # engines know JSON by this name only
        endpoint = ask.endpoint
        target = upstream_target(exchange.path, exchange.query)
        job = Job(request_id, exchange.method, exchange.path, endpoint, target, caller, policy, passed)
        await self.fill(job, ask, slot, body)
        return job

    async def fill(self, job: Job, ask: Ask, slot: AdmissionSlot, body: Body) -> None:
        """Reads the body into `job`: what it says, and what the replica gets of it."""

        def resolve(path: str, model: str | None, cache_salt: str | None) -> CacheScope:
            served = job.served = resolve_model(self._fleet, model, path)
            return CacheScope(served.root_model, served.adapter, self._keyring.cache_salt(job.caller, cache_salt))

        reading = self._read_here(ask, body, resolve)
        if reading is None:
            self._metrics.worker_reads.inc()
            reading = await self._read_by_a_worker(ask, body, slot, resolve)
        job.body = body if reading.body is None else reading.body
        slot.hold_only(len(job.body))
        self._take(job, reading)

    def _read_here(self, ask: Ask, body: Body, resolve: Resolve) -> Reading | None:
        """Reads a body at once; None if that would hold the event loop for too long."""
        if len(body) > _INLINE_BYTES and (len(body) > _INLINE_SPARSE_BYTES or ask.is_form or not is_sparse(body)):
            return None
        try:
            return read_body(ask, body, self._rules, resolve, Steps(_INLINE_STEPS))
        except TooManySteps:
            return None

    async def _read_by_a_worker(self, ask: Ask, body: Body, slot: AdmissionSlot, resolve: Resolve) -> Reading:
        """Waits for a turn and for a worker. Raises a 429 if that takes too long or too much memory."""
        parsed_bytes = 0 if ask.is_form else min(_PARSED_BYTES_PER_BYTE * len(body), _MAX_PARSED_BYTES)
        # A gateway that admits a body also reads it, however little memory it may hold.
        reading_bytes = min(_COPIES * len(body) + parsed_bytes, self._max_buffered_bytes // 2)
        try:
            async with asyncio.timeout(_TURN_S) as waiting, self._workers.turns.of(slot.holder):
                waiting.reschedule(None)
                with slot.holding(reading_bytes):
                    return await self._workers.read(ask, body, resolve)
        except TimeoutError:
            message = f"body: too many large bodies are read before it; it waited for {_TURN_S:g} s. Retry shortly."
            raise ApiError(429, "gateway_overloaded", message, "body", {"retry-after": "1"}) from None

    def _take(self, job: Job, reading: Reading) -> None:
        if reading.path != job.path:  # explain: the body told which API it belongs to
            job.path, job.endpoint = reading.path, endpoint_of(reading.path)
        job.model = reading.model
        job.stream, job.strip_usage = reading.stream, reading.strip_usage
        job.wants_token_ids, job.reads_cache = reading.wants_token_ids, reading.reads_cache
        job.previous_response_id = reading.previous_response_id
        job.has_effects = reading.has_effects or may_have_effects(job.method, job.endpoint)
        job.prompt, job.is_batch = reading.prompt, reading.is_batch
        if job.prompt is not None and job.prompt.keys:
            job.tokens = self.estimator(job.served.pool).estimate(job.prompt)
            job.prompt_tokens = job.tokens[-1]
            if not job.is_batch:  # the engine's events repeat it, which tells the blocks of this prompt
                job.headers["x-session-id"] = job.prompt.keys[-1]

    def policy(self, headers: Mapping[str, str]) -> str:
        """The policy: from the header `x-kvgate-policy` where that is allowed, else from the settings."""
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


def resolve_model(fleet: Fleet, name: str | None, path: str) -> Served:
    """The pool that serves the model of a request. Raises a 400 without a model, a 404 for an unknown one."""
    if name is None:
        only = fleet.only_base_model()
        if only is None and stored_response(path):  # the response's id tells later which pool has it
            only = next(iter(fleet.served.values()), None)
        if endpoint_of(path).needs_model or (only is None and fleet.served):
            raise bad_field("model", "required; GET /v1/models lists what is served here.", "missing_model")
        if only is None:
            raise no_replica()
        return only
    served = fleet.resolve(name)
    if served is None:
        if not fleet.served:
            raise no_replica()
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise ApiError(
            404, "model_not_found", f"The model `{shown}` is not served here; GET /v1/models lists what is.", "model"
        )
    return served


def no_replica() -> ApiError:
    """A 503. It does not say why: reasons name addresses, which only operators may see (GET /ready)."""
    return ApiError(503, "no_replica", "No replica can serve this now; /ready says why.", headers={"retry-after": "1"})


def upstream_headers(headers: Mapping[str, str], request_id: str, pass_authorization: bool) -> dict[str, str]:
    """The headers for a replica. Only named headers pass, so that a client cannot send one that a replica trusts."""
    passed = {name: headers[name] for name in _PASSED_HEADERS if name in headers}
    passed["x-request-id"] = request_id
    if "content-type" in headers:
        passed["content-type"] = headers["content-type"]
    if pass_authorization and "authorization" in headers:
        passed["authorization"] = headers["authorization"]
    return passed


def _check_kind(method: str, ask: Ask, has_body: bool) -> None:
    """Raises a 405 for a prompt that does not come by POST. Raises a 415 for a body that is neither JSON nor a form: a
    web page of another origin may send such a body without asking."""
    if ask.endpoint.prompt is not None and method != "POST":
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
