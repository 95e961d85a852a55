"""Reads a request's body: parses it, checks it, and makes it fit for a replica. No I/O.

Fields that vLLM trusts are removed by their parsed key, not by their bytes, because `\\u0073ession_id` is the same key.
A body that needs no change goes to the replica as the client sent it. New fields are appended before the closing brace.
Where fields are removed or replaced, the rest of the text stays as it is (edit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from gateway.endpoints import Endpoint, endpoint_of
from gateway.errors import ApiError, bad_field
from gateway.prompt import CacheScope, Prompt, PromptLimits, Steps, read_prompt
from gateway.request.reading.edit import Edit, edited, edits_of, steps_of
from gateway.request.reading.form import is_form, read_form
from gateway.request.reading.media import guard_media
from gateway.request.reading.model_field import Span
from gateway.request.reading.output import output_of, prompts_of, runs_tools
from gateway.request.reading.resumable import why_not_resumed
from gateway.request.reading.structure import check_structure

Body = bytes | bytearray

_MAX_ID_CHARS = 256
_MAX_SALT_CHARS = 65_536
_MAX_MODEL_CHARS = 1024
_SCORE_FIELDS = ("queries", "data_1", "text_1")
_TRUSTED_SAMPLING = ("extra_args",)
"""Fields of vLLM's sampling parameters by which connectors and events are steered."""
_TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})


@dataclass(frozen=True, slots=True)
class BodyRules:
    """The rules by which a gateway reads all bodies."""

    removed: tuple[str, ...]
    """Fields that are removed from JSON bodies."""
    removed_from_forms: tuple[str, ...]
    prompt: PromptLimits


class BodyHead(NamedTuple):
    """The path and the content type that come with a body. If `path` is empty, the body's fields show its API."""

    path: str
    content_type: str = ""
    model: str | None = None
    """Of the query: it counts if there is no body."""

    @property
    def is_form(self) -> bool:
        """Whether the body is a form. If the path's prompt is read, the body is JSON whatever its content type."""
        return self.endpoint.prompt is None and is_form(self.content_type)

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_of(self.path)


ResolveScopes = Callable[[str, str | None, str | None], Sequence[CacheScope]]
"""Gives the cache scopes for a request's path, model and cache_salt: one for each backend of the model, all with the
same salt. Raises ApiError if the model is not served."""


@dataclass(slots=True)
class ParsedBody:
    """What the gateway learns from a body."""

    path: str
    model: str | None = None
    body: bytes | None = None
    """The body for the replica. None if that is the client's body."""
    content_type: str = ""
    """The type of `body`; empty if it stays as it was."""
    model_at: Span | None = None
    """Where the text of `model` is in the body for the replica, if that was looked for."""
    prompt: Prompt | None = None
    """None if the body is not JSON. It has no keys if the path's prompt is not read."""
    other_prompts: list[Prompt] = field(default_factory=list)
    """The same prompt in the scopes after the first one."""
    stream: bool = False
    strip_usage: bool = False
    is_usage_open: bool = False
    is_batch: bool = False
    reads_cache: bool = True
    wants_token_ids: bool = False
    choices: int = 1
    max_output_tokens: int | None = None
    refers_to: str = ""
    """The id of a stored object that the body names (`Endpoint.refers_to`)."""
    has_effects: bool = False
    """Whether the body asks for effects besides the answer."""
    is_background: bool = False
    """Whether the engine goes on without a client."""
    has_tools: bool = False
    """Whether the body offers tools."""
    not_resumed: str = "api"
    """Why its stream could not go on at another replica; empty if it could."""


def read_body(head: BodyHead, body: Body, rules: BodyRules, resolve_scopes: ResolveScopes, steps: Steps) -> ParsedBody:
    """Reads one body. Raises an ApiError that names the wrong field, and TooManySteps."""
    endpoint = head.endpoint
    if endpoint.prompt is None and head.is_form:
        form = read_form(head.content_type, body, rules.removed_from_forms)
        resolve_scopes(head.path, form.model, None)
        return ParsedBody(head.path, form.model, form.body, form.content_type, form.model_at)
    if not body and endpoint.prompt is None:
        resolve_scopes(head.path, head.model, None)
        return ParsedBody(head.path, head.model)
    check_structure(body)
    document = parse_document(body)
    path = head.path
    if not path:
        path = api_path(document)
        endpoint = endpoint_of(path)
    model, salt = _model(document), _salt(document) if endpoint.takes_cache_salt else None
    scope, *other_scopes = resolve_scopes(path, model, salt)
    if endpoint.lacks_cache_salt and scope.cache_salt is not None:
        message = f"{path} has no cache_salt, so tenants would share one cache of prompts (security.share_cache)."
        raise ApiError(403, "cache_not_isolated", message)
    added, strip_usage = usage_request(endpoint, document)
    if endpoint.takes_cache_salt and scope.cache_salt is not None and scope.cache_salt != salt:
        added["cache_salt"] = scope.cache_salt
    parsed = ParsedBody(path, model, strip_usage=strip_usage, stream=is_true(document.get("stream")))
    parsed.is_usage_open = endpoint.adds_usage and parsed.stream and document.get("stream_options") is None
    parsed.wants_token_ids = bool(document.get("return_token_ids"))
    sampling = _sampling(endpoint, document)
    parsed.choices, parsed.max_output_tokens = output_of(endpoint, sampling)
    echoes_logprobs = document.get("echo") and document.get("logprobs") is not None
    parsed.reads_cache = document.get("prompt_logprobs") is None and not echoes_logprobs
    if endpoint.refers_to is not None:
        parsed.refers_to = _reference(document, endpoint)
    parsed.has_tools = bool(document.get("tools") or document.get("functions"))
    if parsed.stream:
        parsed.not_resumed = why_not_resumed(endpoint, document)
    if endpoint.stores_responses:
        parsed.has_effects = _has_effects(document)
        parsed.is_background = is_true(document.get("background"))
    is_read_in_full = endpoint.prompt is not None and endpoint.reads_all_of_prompt
    changed_parts = [] if is_read_in_full else guard_media(document, rules.prompt, steps)
    named = document if model is not None else {**document, "model": scope.root_model}
    prompt = parsed.prompt = _read_prompt(path, named, scope, rules, steps, changed_parts)
    parsed.other_prompts = [_read_prompt(path, named, other, rules, steps, changed_parts) for other in other_scopes]
    parsed.is_batch = bool(prompt.keys) and endpoint.prompt == "completion" and prompts_of(document) > 1
    inner: dict[str | int, Edit] = {}
    if sampling is not document:
        inner[endpoint.sampling_field] = Edit(cut={*_TRUSTED_SAMPLING})
    parsed.body = upstream_body(body, document, rules.removed, added, changed_parts, inner, steps)
    return parsed


def _read_prompt(
    path: str,
    document: dict[str, Any],
    scope: CacheScope,
    rules: BodyRules,
    steps: Steps,
    changed_parts: list[dict[str, Any]],
) -> Prompt:
    return read_prompt(
        path,
        document,
        root_model=scope.root_model,
        adapter=scope.adapter,
        cache_salt=scope.cache_salt,
        limits=rules.prompt,
        steps=steps,
        changed_parts=changed_parts,
    )


def parse_document(body: Body) -> dict[str, Any]:
    """The JSON object in a body. Raises a 400 for anything else. The last of duplicate keys wins, as in vLLM."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"body: not valid JSON: {error}", "body") from None
    if not isinstance(document, dict):
        raise ApiError(400, "invalid_json", "body: must be a JSON object.", "body")
    return document


def api_path(document: Mapping[str, Any]) -> str:
    """The API path of a body without a path, by the body's fields."""
    if "messages" in document:
        return "/v1/messages" if "system" in document else "/v1/chat/completions"
    if "query" in document:
        return "/v1/rerank"
    if not document.keys().isdisjoint(_SCORE_FIELDS):
        return "/v1/score"
    if "input" in document:
        return "/v1/embeddings" if _is_plain_input(document["input"]) else "/v1/responses"
    return "/v1/completions"


def upstream_body(
    body: Body,
    document: dict[str, Any],
    removed: Collection[str],
    added: dict[str, Any],
    changed_parts: Sequence[dict[str, Any]] = (),
    inner: Mapping[str | int, Edit] | None = None,
    steps: Steps | None = None,
) -> bytes | None:
    """The body for the replica, with `added`, without `removed`, with the uuids that these parts have now, and with the
    `inner` edits of its fields. None if the client's body needs no change. Raises TooManySteps."""
    if changed_parts or inner or not document.keys().isdisjoint(removed) or not document.keys().isdisjoint(added):
        if steps is not None:
            steps.take(steps_of(body))
        edit = edits_of(document, changed_parts, "uuid")
        edit.cut.update(removed)
        edit.added.update(added)
        edit.inner.update(inner or {})
        return edited(body, edit)
    return b"".join(with_fields(body, added, is_empty=not document)) if added else None


def with_fields(body: Body, added: Mapping[str, Any], is_empty: bool = False) -> tuple[memoryview, bytes]:
    """A JSON object's text with fields appended, in two pieces, so that the body is not copied."""
    appended = orjson.dumps(dict(added))
    return memoryview(body)[: body.rindex(b"}")], appended[1:] if is_empty else b"," + appended[1:]


def usage_request(endpoint: Endpoint, document: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The fields that make a stream end with its usage, and whether that chunk must be hidden from the client. No
    fields for a client that says nothing of usage: what its replica is asked is decided later."""
    if not endpoint.adds_usage or not is_true(document.get("stream")):
        return {}, False
    options = document.get("stream_options")
    if not isinstance(options, dict):  # the replica answers with an error, if it is not null
        return {}, False
    if is_true(options.get("include_usage")):
        return {}, False
    wanted = {**options, "include_usage": True}
    if "continuous_usage_stats" in wanted:  # vLLM ignores it without `include_usage`
        wanted["continuous_usage_stats"] = False
    return {"stream_options": wanted}, True


def is_true(value: Any) -> bool:
    """Whether vLLM reads a value as true (pydantic, where it is not strict)."""
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return isinstance(value, int | float) and value == 1


def _sampling(endpoint: Endpoint, document: dict[str, Any]) -> dict[str, Any]:
    """The object with the sampling parameters: the document, or a field of it. Raises a 400 for a field that is not
    accepted."""
    for name in endpoint.refused_fields:
        if document.get(name) is not None:
            raise bad_field(name, "not accepted here: engines trust the digests in it.", "field_not_allowed")
    inner = document.get(endpoint.sampling_field) if endpoint.sampling_field else None
    return inner if isinstance(inner, dict) else document


def _model(document: Mapping[str, Any]) -> str | None:
    name = document.get("model")
    if name is not None and not isinstance(name, str):
        raise bad_field("model", "must be a string.", "invalid_type")
    return name if name is None else name[:_MAX_MODEL_CHARS]  # no served name is longer


def _salt(document: Mapping[str, Any]) -> str | None:
    given = document.get("cache_salt")
    if given is not None and (not isinstance(given, str) or not given):
        raise bad_field("cache_salt", "must be a non-empty string.", "invalid_type")
    if given and len(given) > _MAX_SALT_CHARS:
        raise bad_field("cache_salt", f"longer than {_MAX_SALT_CHARS} characters.")
    return given


def _reference(document: Mapping[str, Any], endpoint: Endpoint) -> str:
    """The id in the field that names a stored object; empty if there is none. What only other engines than vLLM read is
    not checked."""
    assert endpoint.refers_to is not None
    field_name, _ = endpoint.refers_to
    given = document.get(field_name)
    if not endpoint.stores_responses:
        return given if isinstance(given, str) and len(given) <= _MAX_ID_CHARS else ""
    if given is not None and not isinstance(given, str):
        raise bad_field(field_name, "must be a string.", "invalid_type")
    if given and len(given) > _MAX_ID_CHARS:
        raise bad_field(field_name, f"longer than {_MAX_ID_CHARS} characters.")
    return given or ""


def _has_effects(document: Mapping[str, Any]) -> bool:
    """Whether a response runs in the background, is stored, or may use tools that the server runs. A missing `store`
    is no effect: the engine's configuration decides then, not the client."""
    return any(document.get(name) not in (None, False) for name in ("background", "store")) or runs_tools(document)


def _is_plain_input(value: Any) -> bool:
    """Whether the input is a list of texts or token ids. A list with objects is the input of a response."""
    return isinstance(value, list) and not any(isinstance(item, dict) for item in value)
