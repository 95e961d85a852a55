"""From a request's bytes to a Job: authenticated already, not placed yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.admission import Caller, Keyring
from gateway.errors import ApiError, bad_field
from gateway.fleet import Fleet, Served
from gateway.form import is_form, without_fields
from gateway.http.exchange import Exchange
from gateway.job import (
    PROMPT_PATHS,
    TRUSTED_FIELDS,
    Job,
    model_of_form,
    parse_document,
    resolve_model,
    upstream_body,
    upstream_headers,
    usage_request,
)
from gateway.media import guard_media
from gateway.paths import folded, is_denied, is_plain, upstream_target
from gateway.prompt import Prompt, PromptLimits, TokenEstimator, read_prompt
from gateway.settings import GatewaySettings

POLICIES = ("prefix_kv_aware", "round_robin", "random", "least_loaded", "power_of_two", "consistent_hash")


_MAX_ID_CHARS = 256
# Of a batch of conversations to embed, only the first is read. A score names its two sides in one of four ways, and
# the engine may take another than the one that is read.
_READ_IN_FULL = PROMPT_PATHS - {"/v1/embeddings", "/v1/score", "/score"}


class Reader:
    """Reads requests; keeps, per pool, what was learned of its tokenizer."""

    def __init__(self, settings: GatewaySettings, keyring: Keyring, fleet: Fleet) -> None:
        security = settings.security
        self._keyring = keyring
        self._fleet = fleet
        self._policy = settings.policy
        self._pass_authorization = not security.api_keys and security.replica_api_key is None
        self._denied = tuple(folded(path) for path in security.denied_paths)
        self._removed = TRUSTED_FIELDS if security.allow_priority else (*TRUSTED_FIELDS, "priority")
        # A form gets no salt of its tenant's; then it shall have none at all.
        self._removed_from_forms = (*self._removed, "cache_salt") if security.api_keys else self._removed
        self._limits = PromptLimits(settings.limits.max_image_pixels, tuple(security.image_hosts))
        self._estimators: dict[str, TokenEstimator] = {}

    def estimator(self, pool: str) -> TokenEstimator:
        return self._estimators.setdefault(pool, TokenEstimator())

    def refuse_denied(self, path: str) -> None:
        """Raises a 404 for the paths that must never reach a replica."""
        if is_denied(path, self._denied) or not is_plain(path):
            raise ApiError(404, "path_not_allowed", f"{path} is not available through this gateway.")

    def read(self, exchange: Exchange, request_id: str, caller: Caller, body: bytes) -> Job:
        """Read one request. Raises ApiError naming the field that is wrong."""
        method, path, headers = exchange.method, exchange.path, exchange.headers
        document = self._document(method, path, headers, body)
        as_form = _is_form(path, headers)
        job = Job(
            id=request_id,
            method=method,
            path=path,
            target=upstream_target(path, exchange.query),
            caller=caller,
            body=without_fields(headers["content-type"], body, self._removed_from_forms) if as_form else body,
            served=resolve_model(self._fleet, document, path),
            policy=self.policy(headers),
            headers=upstream_headers(headers, request_id, pass_authorization=self._pass_authorization),
        )
        if document and not as_form:
            self.fill(job, document)
        return job

    def fill(self, job: Job, document: dict[str, Any]) -> None:
        """Read the prompt and prepare the body that the replica gets."""
        salt = self.salt(job.caller, document)
        added, job.strip_usage = usage_request(job.path, document)
        if salt is not None and salt != document.get("cache_salt"):
            added["cache_salt"] = salt
        job.stream = document.get("stream") is True
        job.wants_token_ids = bool(document.get("return_token_ids"))
        tells_logprobs = document.get("echo") and document.get("logprobs") is not None
        job.reads_cache = document.get("prompt_logprobs") is None and not tells_logprobs
        if job.path == "/v1/responses":
            job.previous_response_id = _previous_response(document)
        had_media_ids = job.path not in _READ_IN_FULL and guard_media(document, self._limits)
        job.prompt = self.prompt(job.path, document, job.served, salt)
        if job.prompt.keys:
            job.tokens = self.estimator(job.served.pool).estimate(job.prompt)
            job.prompt_tokens = job.tokens[-1]
            job.is_batch = _is_batch(job.path, document)
            if not job.is_batch:  # the engine's events name it, which tells this prompt's blocks
                job.headers["x-session-id"] = job.prompt.keys[-1]
        job.body = upstream_body(job.body, document, self._removed, added, job.prompt.body_changed or had_media_ids)

    def prompt(self, path: str, document: dict[str, Any], served: Served, salt: str | None) -> Prompt:
        """The prompt's chain; empty on paths that carry none."""
        return read_prompt(
            path,
            document if document.get("model") is not None else {**document, "model": served.root_model},
            root_model=served.root_model,
            adapter=served.adapter,
            cache_salt=salt,
            limits=self._limits,
        )

    def salt(self, caller: Caller, document: Mapping[str, Any]) -> str | None:
        """The cache salt that the engine will see."""
        given = document.get("cache_salt")
        if given is not None and (not isinstance(given, str) or not given):
            raise bad_field("cache_salt", "must be a non-empty string.", "invalid_type")
        return self._keyring.cache_salt(caller, given)

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

    def _document(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any] | None:
        if _is_form(path, headers):
            return model_of_form(body)
        if path in PROMPT_PATHS and method != "POST":
            raise ApiError(405, "method_not_allowed", f"{path} takes POST.", headers={"allow": "POST"})
        return parse_document(body) if body or path in PROMPT_PATHS else None


def _previous_response(document: Mapping[str, Any]) -> str:
    given = document.get("previous_response_id")
    if given is not None and not isinstance(given, str):
        raise bad_field("previous_response_id", "must be a string.", "invalid_type")
    if given and len(given) > _MAX_ID_CHARS:
        raise bad_field("previous_response_id", f"longer than {_MAX_ID_CHARS} characters.")
    return given or ""


def _is_batch(path: str, document: Mapping[str, Any]) -> bool:
    prompt = document.get("prompt")
    return path == "/v1/completions" and isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _is_form(path: str, headers: Mapping[str, str]) -> bool:
    """A form, where there can be one: a prompt's JSON is read as such whatever it is called."""
    return path not in PROMPT_PATHS and is_form(headers.get("content-type", ""))
