"""A request as the gateway understands it: read, checked, and made fit for a replica. No I/O.

Fields that vLLM trusts are taken out by parsed key, never by byte search (`\\u0073ession_id` is the same key). A body
that needs no change travels as it came; one that only gains fields gets them appended before its closing brace,
because JSON's last duplicate wins; only a body that loses fields is serialised again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.admission import Caller
from gateway.errors import ApiError, bad_field
from gateway.fleet import Fleet, Served
from gateway.paths import stored_response
from gateway.prompt import Prompt

TRUSTED_FIELDS = ("session_id", "request_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params")
"""Body fields by which a client could act on the engine past the gateway (facts: vLLM's request schema)."""

_PASSED_HEADERS = ("accept", "traceparent", "tracestate", "anthropic-version", "anthropic-beta", "openai-beta")
_USAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
PROMPT_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/v1/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    }
)
_MODEL_OPTIONAL = frozenset({"/tokenize", "/detokenize"})
_FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


@dataclass(slots=True)
class Job:
    """One client request, ready to be placed and sent."""

    id: str
    method: str
    path: str
    target: str
    """Path and query, as sent upstream."""
    caller: Caller
    body: bytes
    served: Served
    policy: str
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)
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


def parse_document(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises a 400 for anything else; duplicate keys: the last wins, as in vLLM."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"body: not valid JSON: {error}", "body") from None
    if not isinstance(document, dict):
        raise ApiError(400, "invalid_json", "body: must be a JSON object.", "body")
    return document


def resolve_model(fleet: Fleet, document: Mapping[str, Any] | None, path: str) -> Served:
    """The pool that serves what the request names. Raises a 400 without a model, a 404 for an unknown one."""
    name = document.get("model") if document is not None else None
    if name is None:
        only = fleet.only_pool()
        if only is None and stored_response(path):  # whose pool it is in, its id will tell
            only = next(iter(fleet.served.values()), None)
        if path in PROMPT_PATHS - _MODEL_OPTIONAL or (only is None and fleet.served):
            raise bad_field("model", "required; GET /v1/models lists what is served here.", "missing_model")
        if only is None:
            raise no_replica()
        return only
    if not isinstance(name, str):
        raise bad_field("model", "must be a string.", "invalid_type")
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


def model_of_form(body: bytes) -> dict[str, Any]:
    """The model named in a multipart form (audio uploads), as a document; empty when it names none."""
    found = _FORM_MODEL.search(body)
    return {"model": found[1].decode("utf-8", "replace")} if found else {}


def upstream_headers(headers: Mapping[str, str], request_id: str, pass_authorization: bool) -> dict[str, str]:
    """What a replica gets to see: an allow-list, so that nothing it would trust comes from a client."""
    passed = {name: headers[name] for name in _PASSED_HEADERS if name in headers}
    passed["x-request-id"] = request_id
    if "content-type" in headers:
        passed["content-type"] = headers["content-type"]
    if pass_authorization and "authorization" in headers:
        passed["authorization"] = headers["authorization"]
    return passed


def upstream_body(
    body: bytes, document: dict[str, Any], removed: tuple[str, ...], added: Mapping[str, Any], changed: bool
) -> bytes:
    """The body for the replica: as it came, with `added` appended, or serialised again where fields must go."""
    if changed or any(name in document for name in removed):
        kept = {name: value for name, value in document.items() if name not in removed}
        kept.update(added)
        try:
            return orjson.dumps(kept)
        except (TypeError, orjson.JSONEncodeError) as error:
            raise ApiError(400, "invalid_json", f"body: cannot be passed on: {error}", "body") from None
    return with_fields(body, added, is_empty=not document) if added else body


def with_fields(body: bytes, added: Mapping[str, Any], is_empty: bool = False) -> bytes:
    """A JSON object's text with fields appended: the last duplicate wins."""
    head = body.rstrip()[:-1].rstrip()
    return head + (b"" if is_empty else b",") + orjson.dumps(dict(added))[1:]


def usage_request(path: str, document: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The fields that make a stream end with its usage, and whether the client must not see that chunk."""
    if path not in _USAGE_PATHS or document.get("stream") is not True:
        return {}, False
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return {}, False  # the replica will say what is wrong with it
    if options and options.get("include_usage") is True:
        return {}, False
    return {"stream_options": {**(options or {}), "include_usage": True}}, True
