"""Reads an authenticated client's request (`Reader`) into a `Job`, which is not placed yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gateway.endpoints import endpoint_of
from gateway.errors import ApiError, bad_field
from gateway.http.exchange import Exchange
from gateway.metrics.gateway_metrics import Metrics
from gateway.prompt import CacheScope, Prompt, PromptLimits, Steps, TokenEstimator, TooManySteps
from gateway.replicas.fleet import Fleet
from gateway.replicas.offers import Offer
from gateway.replicas.served import NONE_DECODES, Backends, within
from gateway.request.admission import AdmissionSlot
from gateway.request.job import Job
from gateway.request.keyring import Caller, Keyring
from gateway.request.objectives import Objectives
from gateway.request.paths import PathRules, may_have_effects, model_in_query, object_in_path, upstream_target
from gateway.request.reading import Body, BodyHead, BodyRules, ParsedBody, ResolveScopes, read_body
from gateway.request.reading.body_readers import BodyReaders
from gateway.request.reading.structure import is_sparse
from gateway.request.route import Route
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.policies import POLICIES

TRUSTED_FIELDS = ("session_id", "request_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params")
"""Body fields that engines trust, so clients may not set them (source: vLLM's request schema)."""

MODEL_NOT_FOUND: Final = "model_not_found"
SESSION_HEADER: Final = "x-kvgate-session"
"""What a client calls its conversation, so that it stays with its backend."""
_MAX_SESSION_CHARS: Final = 256
_PASSED_HEADERS = ("accept", "traceparent", "tracestate", "anthropic-version", "anthropic-beta", "openai-beta")
_PASSED_WITHOUT_BODY = ("range", "if-range", "if-none-match", "if-modified-since")
"""A file or a video is fetched in parts, or not again if it has not changed."""
# A worker process reads a body that is larger or takes more steps. A body within these limits blocks the event loop for
# at most 40 ms. A sparse body (an image) may be larger, because parsing it is mostly copying.
_INLINE_BYTES: Final = 2**18
_INLINE_SPARSE_BYTES: Final = 2**22
_INLINE_STEPS: Final = 3000
# The most memory that reading a body in a worker takes, with the worker's answer: see docs/adr/0011-reading.md.
_COPIES: Final = 3
_PARSED_BYTES_PER_BYTE: Final = 10
_MAX_PARSED_BYTES: Final = 200 * 2**20
_TURN_S: Final = 60.0


class Reader:
    """Reads requests. Keeps one token estimator for each pool."""

    def __init__(
        self, settings: GatewaySettings, keyring: Keyring, fleet: Fleet, metrics: Metrics, objectives: Objectives
    ) -> None:
        self._keyring = keyring
        self._objectives = objectives
        self._fleet = fleet
        self._metrics = metrics
        self._body_readers = BodyReaders()
        self._estimators: dict[str, TokenEstimator] = {}
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """Requests are read by these settings from now on."""
        security, limits = settings.security, settings.limits
        self._policy = settings.policy
        self._max_told_tokens = settings.resume.max_prompt_tokens
        knows_tenants = bool(security.api_keys) or settings.picker.tenant is not None
        self._pass_authorization = not knows_tenants and security.replica_api_key is None
        self.paths = PathRules(security.allowed_paths, security.denied_paths)
        removed = TRUSTED_FIELDS if security.allow_priority else (*TRUSTED_FIELDS, "priority")
        self._rules = BodyRules(
            removed,
            # The gateway cannot add a tenant's salt to a form, so it removes any salt from forms.
            (*removed, "cache_salt") if knows_tenants else removed,
            PromptLimits(limits.max_image_pixels, tuple(security.image_hosts), security.media_folder or ""),
        )
        self._max_buffered_bytes = limits.max_buffered_bytes

    def estimator(self, pool: str) -> TokenEstimator:
        estimator = self._estimators.get(pool)
        if estimator is None:
            estimator = self._estimators[pool] = TokenEstimator()
        return estimator

    async def close(self) -> None:
        await self._body_readers.close()

    async def read(
        self,
        exchange: Exchange,
        request_id: str,
        caller: Caller,
        slot: AdmissionSlot,
        body: Body,
        *,
        is_traced: bool = False,
    ) -> Job:
        """Reads one request. A worker process reads a large body, so that it does not delay other requests' tokens.
        Raises an ApiError that names the wrong field."""
        headers = exchange.headers
        model = model_in_query(exchange.query) if exchange.query and not body else None
        head = BodyHead(exchange.path, headers.get("content-type", ""), model)
        endpoint, is_form = head.endpoint, head.is_form
        if endpoint.prompt is not None and exchange.method != "POST":
            raise ApiError(405, "method_not_allowed", f"{head.path} takes POST.", headers={"allow": "POST"})
        if body and not is_form and head.content_type != "application/json":
            _check_type(head.content_type)
        policy = self.policy(headers)
        passed = upstream_headers(headers, request_id, pass_authorization=self._pass_authorization)
        if body and not is_form:
            passed["content-type"] = "application/json"  # engines accept JSON under this name only
        if not body:
            passed |= {name: headers[name] for name in _PASSED_WITHOUT_BODY if name in headers}
        target = upstream_target(exchange.path, exchange.query)
        session = headers.get(SESSION_HEADER, "")[:_MAX_SESSION_CHARS]
        parsed, route = await self._parsed(head, caller, slot, body, exchange.subset)
        method, priority = exchange.method, self._objectives.priority(headers)
        return self._job(
            head, body, parsed, route, request_id, caller, policy, passed, priority, method, target, session, is_traced
        )

    async def read_to_explain(
        self, headers: Mapping[str, str], path: str, caller: Caller, slot: AdmissionSlot, body: Body
    ) -> Job:
        """Reads a request that is explained, and goes nowhere. If `path` is empty, the fields of the body show its
        API."""
        policy, head = self.policy(headers), BodyHead(path)
        parsed, route = await self._parsed(head, caller, slot, body)
        return self._job(head, body, parsed, route, "explain", caller, policy, {}, self._objectives.priority(headers))

    async def _parsed(
        self, head: BodyHead, caller: Caller, slot: AdmissionSlot, body: Body, subset: frozenset[str] | None = None
    ) -> tuple[ParsedBody, Route]:
        """What the body says, and where it goes. From now on, the body for the replica is held."""
        found: list[tuple[Route, Backends]] = []

        def resolve_scopes(path: str, model: str | None, cache_salt: str | None) -> list[CacheScope]:
            route = self._route(path, model, caller, subset)
            readable = (*route.backends, *self._fallbacks(route))
            found.append((route, readable))
            salt = self._keyring.cache_salt(caller, cache_salt)
            return [CacheScope(backend.root_model, backend.adapter, salt) for backend in readable]

        parsed = self._read_here(head, body, resolve_scopes)
        if parsed is None:
            self._metrics.worker_reads.inc()
            parsed = await self._read_by_a_worker(head, body, slot, resolve_scopes)
        slot.set_held_bytes(len(body if parsed.body is None else parsed.body))
        route, readable = found[-1]
        if parsed.prompt is not None:
            self._tell(route, readable, parsed, parsed.prompt)
        return parsed, route

    def _job(
        self,
        head: BodyHead,
        body: Body,
        parsed: ParsedBody,
        route: Route,
        request_id: str,
        caller: Caller,
        policy: str,
        passed: dict[str, str],
        priority: int | None,
        method: str = "POST",
        target: str = "",
        session: str = "",
        is_traced: bool = False,
    ) -> Job:
        if parsed.content_type:
            passed["content-type"] = parsed.content_type
        endpoint = head.endpoint if parsed.path == head.path else endpoint_of(parsed.path)
        prompt_tokens = route.tokens[-1] if route.tokens else 0
        may_ask = bool(route.tokens) and endpoint.returns_token_ids and not parsed.not_resumed
        # Without the names of its fields, it takes half the time.
        return Job(
            request_id, method, parsed.path, endpoint, target, caller, policy, passed, route, session,
            parsed.model,
            body if parsed.body is None else parsed.body,
            parsed.model_at,
            prompt_tokens,
            len(parsed.prompt.images) if parsed.prompt is not None else 0,
            parsed.stream, parsed.strip_usage, parsed.is_usage_open, parsed.is_batch, parsed.reads_cache,
            parsed.wants_token_ids, parsed.not_resumed,
            may_ask and prompt_tokens <= self._max_told_tokens,
            parsed.choices, parsed.max_output_tokens, parsed.refers_to, is_traced, parsed.has_tools,
            parsed.is_background,
            parsed.has_effects or may_have_effects(method, endpoint),
            priority,
        )  # fmt: skip

    def _read_here(self, head: BodyHead, body: Body, resolve_scopes: ResolveScopes) -> ParsedBody | None:
        """Reads a body in this process. None if that would block the event loop for too long."""
        if len(body) > _INLINE_BYTES and (len(body) > _INLINE_SPARSE_BYTES or head.is_form or not is_sparse(body)):
            return None
        try:
            return read_body(head, body, self._rules, resolve_scopes, Steps(_INLINE_STEPS))
        except TooManySteps:
            return None

    async def _read_by_a_worker(
        self, head: BodyHead, body: Body, slot: AdmissionSlot, resolve_scopes: ResolveScopes
    ) -> ParsedBody:
        """Waits for a turn and for a worker. Raises a 429 if that takes too long or too much memory."""
        parsed_bytes = 0 if head.is_form else min(_PARSED_BYTES_PER_BYTE * len(body), _MAX_PARSED_BYTES)
        # Capped, so that a gateway with a small `max_buffered_bytes` can read each body that it admits.
        reading_bytes = min(_COPIES * len(body) + parsed_bytes, self._max_buffered_bytes // 2)
        try:
            async with asyncio.timeout(_TURN_S) as waiting, self._body_readers.turns.take(slot.holder):
                waiting.reschedule(None)
                with slot.holding(reading_bytes):
                    return await self._body_readers.read(head, body, self._rules, resolve_scopes)
        except TimeoutError:
            message = f"body: too many large bodies are read before it; it waited for {_TURN_S:g} s. Retry shortly."
            raise ApiError(429, "gateway_overloaded", message, "body", {"retry-after": "1"}) from None

    def _route(self, path: str, model: str | None, caller: Caller, subset: frozenset[str] | None) -> Route:
        """To the first backend of its model. With a `subset`, no other model answers in its place. Raises what
        `resolve_model` raises, and a 503 if no replica of the model is in the subset."""
        placed_as = model if model is not None else self._fleet.only_base_model()
        offer = self._fleet.offers.get(placed_as or "")
        backends = resolve_model(self._fleet, model, path, caller)
        fallbacks = offer.fallback if offer is not None and subset is None else ()
        allowed = within(backends, subset)
        if not allowed and model is None and object_in_path(path):  # the object's id gives the pool later
            allowed = next(filter(None, (within(each, subset) for each in self._fleet.served.values())), ())
        if not allowed:
            raise not_in_subset()
        return Route(placed_as, allowed, offer, allowed[0], fallbacks, subset)

    def _fallbacks(self, route: Route) -> Backends:
        """The backends of the models that may answer in the place of the request's own, if that has no ready replica
        now: so their chains are at hand."""
        if not route.fallbacks:
            return ()
        fleet = self._fleet
        if any(fleet.is_ready(replica) for backend in route.backends for replica in backend.replicas):
            return ()
        found = {each.backend: each for told in route.fallbacks for each in fleet.backends(told.model)}
        return tuple(each for name, each in found.items() if all(name != own.backend for own in route.backends))

    def _tell(self, route: Route, readable: Backends, parsed: ParsedBody, prompt: Prompt) -> None:
        """Tells the route of the prompt, and of its chain at each backend for which it was read."""
        tokens: list[int] = []
        chains: dict[str, tuple[Prompt, list[int]]] = {}
        needed_tokens, refusing = 0, frozenset[str]()
        if prompt.keys:
            tokens = self.estimator(route.served.pool).estimate(prompt)
            needed_tokens = tokens[-1] + (parsed.max_output_tokens or 0) // parsed.choices
            if prompt.images:
                refusing = self._fleet.refusing_media()
            if parsed.other_prompts:
                for backend, each in zip(readable, (prompt, *parsed.other_prompts), strict=True):
                    chains[backend.backend] = each, self.estimator(backend.pool).estimate(each)
        route.was_read(prompt, tokens, chains, needed_tokens, refusing)

    def policy(self, headers: Mapping[str, str]) -> str:
        """The policy of a request: from the header `x-kvgate-policy` if that is allowed, else from the settings."""
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


def resolve_model(fleet: Fleet, name: str | None, path: str, caller: Caller) -> Backends:
    """The pools that serve a request's model, at least one. Raises a 400 if the model is missing, a 404 if it is
    unknown, or if the caller may not use it."""
    backends = fleet.backends(name)
    if caller.models is not None:
        names = {name} if name is not None else {one for one, each in fleet.served.items() if each is backends}
        backends = backends if names & caller.models else ()
    if name is None:
        if not backends and object_in_path(path):  # the object's id gives the pool later
            backends = next(iter(fleet.served.values()), ())
        if not backends and fleet.served:
            raise bad_field("model", "required; GET /v1/models lists what is served here.", "missing_model")
        if not backends:
            raise no_replica()
    elif not backends and name in fleet.offers and caller.may_use(name):
        backends = _of_fallbacks(fleet, fleet.offers[name])
        if not backends:
            raise no_replica()
    elif not backends:
        if not fleet.served:
            raise no_replica()
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise ApiError(
            404, MODEL_NOT_FOUND, f"The model `{shown}` is not served here; GET /v1/models lists what is.", "model"
        )
    return backends


def _of_fallbacks(fleet: Fleet, offer: Offer) -> Backends:
    """Of a model that nobody serves: without a replica, so that it is not placed there by itself."""
    backends = (each for told in offer.fallback for each in fleet.backends(told.model))
    return tuple(replace(each, replicas={}, unshared={}, max_tokens={}) for each in backends)[:1]


def not_in_subset() -> ApiError:
    """A 503 for a request whose proxy allows other endpoints only."""
    message = "No replica of this model is among the endpoints that the proxy allows for this request."
    return ApiError(503, "no_replica_in_subset", message, headers={"retry-after": "1"})


def no_replica(*, are_asleep: bool = False, only_prefills: bool = False) -> ApiError:
    """A 503. It names no other reasons than sleep and roles, because reasons hold addresses, which only operators may
    see (GET /ready)."""
    why = ": replicas of this model are asleep" if are_asleep else f": {NONE_DECODES}" if only_prefills else ""
    message = f"No replica can serve this now{why}; /ready says {'more' if why else 'why'}."
    return ApiError(503, "no_replica", message, headers={"retry-after": "1"})


def upstream_headers(headers: Mapping[str, str], request_id: str, pass_authorization: bool) -> dict[str, str]:
    """The headers for a replica. Only listed headers pass, so that a client cannot send one that replicas trust."""
    passed = {name: headers[name] for name in _PASSED_HEADERS if name in headers}
    passed["x-request-id"] = request_id
    if "content-type" in headers:
        passed["content-type"] = headers["content-type"]
    if pass_authorization and "authorization" in headers:
        passed["authorization"] = headers["authorization"]
    return passed


def _check_type(content_type: str) -> None:
    """Raises a 415 for a body that is neither JSON nor a form, because browsers let a web page of another origin send
    such a body without asking."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (media_type[:12] == "application/" and media_type[-5:] == "+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"content-type: is {media_type[:100] or 'missing'}; send application/json (curl: -H 'content-type: "
            "application/json'), or multipart/form-data where a form is uploaded.",
            "content-type",
        )
