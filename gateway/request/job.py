"""A request, ready to be placed and sent. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.errors import ApiError, bad_field
from gateway.prompt import Prompt
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import Served
from gateway.request.keyring import Caller
from gateway.request.paths import PROMPT_PATHS, stored_response
from gateway.request.reading import Body

TRUSTED_FIELDS = ("session_id", "request_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params")
"""Body fields by which a client could act on the engine past the gateway (facts: vLLM's request schema)."""

_PASSED_HEADERS = ("accept", "traceparent", "tracestate", "anthropic-version", "anthropic-beta", "openai-beta")
_MODEL_OPTIONAL = frozenset({"/tokenize", "/detokenize"})


@dataclass(slots=True)
class Job:
    """One client request, ready to be placed and sent."""

    id: str
    method: str
    path: str
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
    prompt_tokens: int = 0
    stream: bool = False
    strip_usage: bool = False
    is_batch: bool = False
    """Several prompts in one request: what the engine says of it is a sum."""
    reads_cache: bool = True
    """Whether the engine looks for the prompt in its cache: not where it has to tell every prompt token's logprob."""
    wants_token_ids: bool = False
    """Whether the client asked for token ids itself."""
    pinned: str = ""
    """The only replica that can serve it; empty for any."""
    previous_response_id: str = ""
    response_noted: bool = False
    has_effects: bool = False
    """Whether it may do more than compute its answer. Once it was sent, it is not sent to another replica."""


def resolve_model(fleet: Fleet, name: str | None, path: str) -> Served:
    """The pool that serves what the request names. Raises a 400 without a model, a 404 for an unknown one."""
    if name is None:
        only = fleet.only_pool()
        if only is None and stored_response(path):  # whose pool it is in, its id will tell
            only = next(iter(fleet.served.values()), None)
        if path in PROMPT_PATHS - _MODEL_OPTIONAL or (only is None and fleet.served):
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
    """A 503. Why, with addresses, is for those who run the cluster: /ready tells."""
    return ApiError(503, "no_replica", "No replica can serve this now; /ready says why.", headers={"retry-after": "1"})


def upstream_headers(headers: Mapping[str, str], request_id: str, pass_authorization: bool) -> dict[str, str]:
    """What a replica gets to see: an allow-list, so that nothing it would trust comes from a client."""
    passed = {name: headers[name] for name in _PASSED_HEADERS if name in headers}
    passed["x-request-id"] = request_id
    if "content-type" in headers:
        passed["content-type"] = headers["content-type"]
    if pass_authorization and "authorization" in headers:
        passed["authorization"] = headers["authorization"]
    return passed
