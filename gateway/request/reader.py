"""Reads an authenticated client's request (`Reader`) into a `Job`, which is not placed yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.endpoints import Endpoint, endpoint_of
from gateway.errors import ApiError, bad_field
from gateway.http.exchange import Exchange
from gateway.metrics.gateway_metrics import Metrics
from gateway.prompt import CacheScope, Prompt, PromptLimits, Steps, TokenEstimator, TooManySteps
from gateway.replicas.fleet import Fleet
from gateway.replicas.offers import Offer
from gateway.replicas.served import Backends, ServedModel
from gateway.request.admission import AdmissionSlot
from gateway.request.keyring import Caller, Keyring
from gateway.request.paths import PathRules, may_have_effects, model_in_query, object_in_path, upstream_target
from gateway.request.reading import Body, BodyHead, BodyRules, ParsedBody, ResolveScopes, read_body
from gateway.request.reading.body_readers import BodyReaders
from gateway.request.reading.model_field import Span
from gateway.request.reading.structure import is_sparse
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.model_settings import FallbackSettings
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


@dataclass(slots=True)
class Job:
    """One client request, ready to be placed and sent."""

    id: str
    method: str
    path: str
    """The client's path, decoded, without a slash at its end."""
    endpoint: Endpoint
    target: str
    """Path and query for the replica."""
    caller: Caller
    policy: str
    headers: dict[str, str]
    """The headers for the replica."""
    backends: Backends = ()
    """The pools that serve its model."""
    readable: Backends = ()
    """Those for which its prompt is read: also those of its fallbacks, if it needs them."""
    offer: Offer | None = None
    """What the configuration says of its model; None if nothing."""
    option: str = ""
    """The backend of this offer that was chosen for it; "" before."""
    session: str = ""
    """What its client calls its conversation; "" if it does not say."""
    served: ServedModel = field(init=False)
    """The backend that it goes to, with only those of its replicas that can take its prompt and answer."""
    model: str | None = None
    """The name that the client used."""
    body: Body = b""
    """The body for the replica."""
    model_at: Span | None = None
    """Where the text of `model` is in the body, if that was looked for."""
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    """Estimated prompt tokens up to each prefix key, shallow to deep."""
    prompt_tokens: int = 0
    """The last of `tokens`; 0 if there is no prompt."""
    chains: dict[str, tuple[Prompt, list[int]]] = field(default_factory=dict)
    """If there are several backends: `prompt` and `tokens` at each."""
    needed_tokens: int = 0
    """The tokens of its prompt, and those that its answer may have."""
    refusing: frozenset[str] = frozenset()
    """Replicas that refused it, because they do not take what it brings."""
    stream: bool = False
    strip_usage: bool = False
    """Whether the gateway has asked for the usage of a stream in the place of its client, who does not want it."""
    is_usage_open: bool = False
    """Whether the client of a stream says nothing of its usage."""
    is_batch: bool = False
    """Whether the request has several prompts. The engine's usage is then their sum."""
    reads_cache: bool = True
    """False if the engine must compute every prompt token, because the client wants prompt logprobs."""
    wants_token_ids: bool = False
    """Whether the client asked for token ids itself."""
    not_resumed: str = "api"
    """Why its stream could not go on at another replica; empty if it could."""
    asks_ids: bool = False
    """Whether its stream could go on by token ids, so that its replica is asked for them."""
    choices: int = 1
    """How many answers the engine generates side by side, of all prompts together."""
    max_output_tokens: int | None = None
    """The most tokens that the engine generates for it, of all choices together; None if the client set no limit."""
    pinned: str = ""
    """The only replica that can serve the request; empty if any can."""
    refers_to: str = ""
    """The id of a stored object that its body names."""
    held_since_s: float = 0.0
    """Since when it has waited for a ready replica (monotonic clock); 0 if it had not to."""
    waited_s: float = 0.0
    """How long it has waited for room in pools that could not serve it after all."""
    is_traced: bool = False
    """Whether somebody wants to see what its candidates cost."""
    has_tools: bool = False
    """Whether it offers tools to its model."""
    fallbacks: tuple[FallbackSettings, ...] = ()
    """The models that may answer in the place of its own, and were not tried."""
    placed_as: str | None = None
    """The model that it is placed as: the one that the client named, the only one if it named none, or a fallback."""
    is_background: bool = False
    """Whether the engine goes on without the client: its answer, or its connection, ends before it is generated."""
    billed_at_s: float = 0.0
    """The moment of which days, weeks and months it counts to budgets (Unix time); 0 before it was placed."""
    stays: bool = False
    """Whether only its backend can serve it: the beginning of its answer comes from there."""
    may_pair: bool = True
    """Whether another replica may still compute its prompt: not after that has failed."""
    has_effects: bool = False
    """Whether the request may do more than compute its answer. Once sent, it is not sent to another replica."""

    @property
    def counts_as(self) -> str | None:
        """The model that it counts as: of an alias its model, of a fallback the model that answers."""
        return self.offer.model if self.offer is not None else self.placed_as

    @property
    def images(self) -> int:
        """The images, audio and videos of its prompt."""
        return len(self.prompt.images) if self.prompt is not None else 0

    def aim(self, backend: ServedModel) -> None:
        """From now on it goes to this backend. A chain of another backend means nothing there."""
        if self.prompt is not None and self.prompt.keys and backend.backend != self.served.backend:
            known = self.chains.get(backend.backend)
            self.prompt, self.tokens = known or (self.prompt.without_keys(), [])
            if known and not self.is_batch:
                self.headers["x-session-id"] = self.prompt.keys[-1]
            else:
                self.headers.pop("x-session-id", None)
        self.served = backend if self.pinned else backend.fitting(self.needed_tokens, self.refusing)

    def backends_of(self, fleet: Fleet) -> Backends:
        """Those that could serve it now."""
        backends = fleet.backends(self.placed_as)
        return tuple(each for each in backends if each.backend == self.served.backend) if self.stays else backends

    def renew(self, fleet: Fleet) -> None:
        """Replicas may have come or gone. It stays as it was if nobody serves its model any more, or if one replica is
        to serve it."""
        backends = self.backends_of(fleet)
        if backends and not self.pinned:
            self.backends, self.offer = backends, fleet.offers.get(self.placed_as or "")
            self.aim(next((each for each in backends if each.backend == self.served.backend), backends[0]))

    def fall_back(self, model: str, fleet: Fleet) -> None:
        """From now on it is placed as a request for this model, which has backends."""
        self.placed_as, self.option = model, ""
        self.renew(fleet)

    def noted_wait(self, waited_s: float) -> None:
        """It has waited for room in vain. Elsewhere it keeps its place, and what is left of its time."""
        if waited_s > self.waited_s:
            self.waited_s = waited_s
            self.held_since_s = self.held_since_s or time.monotonic() - waited_s

    @property
    def other_name(self) -> str:
        """The name by which its replicas know its model, if the client used another one; else empty. A replica that
        it is pinned to may serve other models only, and then refuses the name that the client used."""
        name = self.served.name
        if not name or self.model is None or name == self.model:
            return ""
        return name if not self.pinned or any(each.name == name for each in self.backends) else ""

    @property
    def has_choice(self) -> bool:
        """Whether it can go to several pools, or only to some replicas of its pool."""
        return len(self.backends) > 1 or self.served is not self.backends[0]

    @property
    def is_choosy(self) -> bool:
        """Whether some replicas are left out, because they do not seem to suit it."""
        return any(each.fitting(self.needed_tokens, self.refusing) is not each for each in self.backends)

    def could_serve(self) -> Collection[str]:
        """The replicas of all backends; if it is pinned, the only one."""
        if self.pinned:
            return (self.pinned,)
        if len(self.backends) < 2:
            return self.served.replicas
        return {name for backend in self.backends for name in backend.replicas}


class Reader:
    """Reads requests. Keeps one token estimator for each pool."""

    def __init__(self, settings: GatewaySettings, keyring: Keyring, fleet: Fleet, metrics: Metrics) -> None:
        self._keyring = keyring
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
        self._pass_authorization = not security.api_keys and security.replica_api_key is None
        self.paths = PathRules(security.allowed_paths, security.denied_paths)
        removed = TRUSTED_FIELDS if security.allow_priority else (*TRUSTED_FIELDS, "priority")
        self._rules = BodyRules(
            removed,
            # The gateway cannot add a tenant's salt to a form, so it removes any salt from forms.
            (*removed, "cache_salt") if security.api_keys else removed,
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

    async def read(self, exchange: Exchange, request_id: str, caller: Caller, slot: AdmissionSlot, body: Body) -> Job:
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
        job = Job(request_id, exchange.method, exchange.path, endpoint, target, caller, policy, passed)
        job.session = headers.get(SESSION_HEADER, "")[:_MAX_SESSION_CHARS]
        await self.fill(job, head, slot, body)
        return job

    async def fill(self, job: Job, head: BodyHead, slot: AdmissionSlot, body: Body) -> None:
        """Reads the body into `job`, with the body for the replica."""

        def resolve_scopes(path: str, model: str | None, cache_salt: str | None) -> list[CacheScope]:
            job.placed_as = model if model is not None else self._fleet.only_base_model()
            job.offer = self._fleet.offers.get(job.placed_as or "")
            job.backends = resolve_model(self._fleet, model, path, job.caller)
            job.served = job.backends[0]
            job.readable = (*job.backends, *self._fallbacks(job))
            salt = self._keyring.cache_salt(job.caller, cache_salt)
            return [CacheScope(backend.root_model, backend.adapter, salt) for backend in job.readable]

        parsed = self._read_here(head, body, resolve_scopes)
        if parsed is None:
            self._metrics.worker_reads.inc()
            parsed = await self._read_by_a_worker(head, body, slot, resolve_scopes)
        job.body = body if parsed.body is None else parsed.body
        slot.set_held_bytes(len(job.body))
        self._apply(job, parsed)

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

    def _apply(self, job: Job, parsed: ParsedBody) -> None:
        if parsed.path != job.path:  # explain: the fields of the body showed its API
            job.path, job.endpoint = parsed.path, endpoint_of(parsed.path)
        if parsed.content_type:
            job.headers["content-type"] = parsed.content_type
        job.model, job.model_at = parsed.model, parsed.model_at
        job.stream, job.strip_usage, job.is_usage_open = parsed.stream, parsed.strip_usage, parsed.is_usage_open
        job.wants_token_ids, job.reads_cache = parsed.wants_token_ids, parsed.reads_cache
        job.choices, job.max_output_tokens = parsed.choices, parsed.max_output_tokens
        job.refers_to = parsed.refers_to
        job.has_tools, job.is_background = parsed.has_tools, parsed.is_background
        job.not_resumed = parsed.not_resumed
        job.has_effects = parsed.has_effects or may_have_effects(job.method, job.endpoint)
        job.prompt, job.is_batch = parsed.prompt, parsed.is_batch
        if job.prompt is not None and job.prompt.keys:
            job.tokens = self.estimator(job.served.pool).estimate(job.prompt)
            job.prompt_tokens = job.tokens[-1]
            job.needed_tokens = job.prompt_tokens + (job.max_output_tokens or 0) // job.choices
            if not job.is_batch:  # the engine's events repeat this id, which shows the prompt's blocks
                job.headers["x-session-id"] = job.prompt.keys[-1]
            may_ask = job.endpoint.returns_token_ids and not job.not_resumed
            job.asks_ids = may_ask and job.prompt_tokens <= self._max_told_tokens
            if job.prompt.images:
                job.refusing = self._fleet.refusing_media()
            if parsed.other_prompts:
                for backend, prompt in zip(job.readable, (job.prompt, *parsed.other_prompts), strict=True):
                    job.chains[backend.backend] = prompt, self.estimator(backend.pool).estimate(prompt)
        job.aim(job.served)

    def _fallbacks(self, job: Job) -> Backends:
        """The backends of the models that may answer in the place of the request's own, if that has no ready replica
        now: so their chains are at hand."""
        if job.offer is None or not job.offer.fallback:
            return ()
        job.fallbacks, fleet = job.offer.fallback, self._fleet
        if any(fleet.is_ready(replica) for backend in job.backends for replica in backend.replicas):
            return ()
        found = {each.backend: each for told in job.fallbacks for each in fleet.backends(told.model)}
        return tuple(each for name, each in found.items() if all(name != own.backend for own in job.backends))

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


def no_replica(*, are_asleep: bool = False) -> ApiError:
    """A 503. It names no other reason than sleep, because reasons hold addresses, which only operators may see
    (GET /ready)."""
    why = ": replicas of this model are asleep" if are_asleep else ""
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
