"""The ranges of vLLM's sampling parameters, and the limit of an answer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.simulator.errors import RequestRefused, bad_request, bad_value

MAX_LOGPROBS = 20
"""vLLM's --max-logprobs."""
_MAX_SEQUENCES = 16_384
"""vLLM's VLLM_MAX_N_SEQUENCES."""
_GREEDY_BELOW = 1e-5
_MAX_SALT_CHARS = 128
_TOO_MANY = f"""n must be at most {_MAX_SEQUENCES}, got {{value}}. \
To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."""
_BAD_SALT = f"""Parameter 'cache_salt' must be at most {_MAX_SALT_CHARS} characters and must not contain \
'@', '/', '\\\\', or NUL."""


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens an answer may have. `max_tokens` never exceeds what the model's length leaves.

    `asked`: whether the request gave a number.
    """

    max_tokens: int
    asked: bool


def token_limit(max_tokens: int | None, name: str, prompt_tokens: int, max_model_len: int) -> TokenLimit:
    """The limit of an answer to a prompt, which is part of the request's field `name`. Raises a 400."""
    if max_tokens is not None and max_tokens < 1:
        raise bad_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if max_tokens is not None and max_tokens > max_model_len:
        message = f"{name}={max_tokens} cannot be greater than max_model_len={max_model_len}."
        raise bad_value(f"{message} Please request fewer output tokens.", name, max_tokens)
    room = max_model_len - prompt_tokens
    if max_tokens is None:
        return TokenLimit(room, asked=False)
    return TokenLimit(min(max_tokens, room), asked=True)


def _plain(message: str, _name: str, _value: object) -> RequestRefused:
    return bad_request(message)


def _with_param(message: str, name: str, _value: object) -> RequestRefused:
    return bad_request(message, name)


def _without_value(message: str, name: str, _value: object) -> RequestRefused:
    return bad_value(message, name)


def _is_greedy(temperature: float | None) -> bool:
    return temperature is not None and temperature < _GREEDY_BELOW


def _has_no_empty(stop: str | list[str]) -> bool:
    return "" not in ([stop] if isinstance(stop, str) else stop)


def _is_a_salt(value: str) -> bool:
    return len(value) <= _MAX_SALT_CHARS and not any(char in value for char in "@/\\\0")


_RULES: tuple[tuple[str, Callable[[Any], bool], str, Callable[[str, str, Any], RequestRefused]], ...] = (
    ("temperature", lambda value: value >= 0, "{name} must be non-negative, got {value}.", bad_value),
    ("temperature", lambda value: value <= 2, "{name} must be in [0, 2], got {value}.", bad_value),
    ("top_p", lambda value: 0 < value <= 1, "{name} must be in (0, 1], got {value}.", bad_value),
    ("top_k", lambda value: value >= -1, "{name} must be 0 (disable), or at least 1, got {value}.", _plain),
    ("min_p", lambda value: 0 <= value <= 1, "{name} must be in [0, 1], got {value}.", _plain),
    ("presence_penalty", lambda value: -2 <= value <= 2, "{name} must be in [-2, 2], got {value}.", _plain),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "{name} must be in [-2, 2], got {value}.", _plain),
    ("repetition_penalty", lambda value: value > 0, "{name} must be greater than zero, got {value}.", _plain),
    ("n", lambda value: value >= 1, "{name} must be at least 1, got {value}.", _plain),
    ("n", lambda value: value <= _MAX_SEQUENCES, _TOO_MANY, _plain),
    ("min_tokens", lambda value: value >= 0, "{name} must be greater than or equal to 0, got {value}.", _plain),
    ("stop", _has_no_empty, "{name} cannot contain an empty string.", _plain),
    ("allowed_token_ids", bool, "{name} is not None and empty!", bad_value),
    ("prompt_logprobs", lambda value: value >= -1, "`{name}` must be a positive value or -1.", bad_value),
    ("prompt_logprobs", lambda value: 0 <= value <= MAX_LOGPROBS,
     f"Requested prompt logprobs of {{value}}, which is greater than max allowed: {MAX_LOGPROBS}", bad_value),
    ("suffix", lambda _: False, "{name} is only supported for models with FIM completion rendering", _with_param),
    ("cache_salt", lambda value: value and isinstance(value, str),
     "Parameter '{name}' must be a non-empty string if provided.", _without_value),
    ("cache_salt", _is_a_salt, _BAD_SALT, _without_value),
)  # fmt: skip
"""A field, whether a value of it is allowed, vLLM's message if it is not, and the error with that message."""


def check_sampling(body: dict[str, Any]) -> None:
    """Raises a 400 if a value of a body is out of range."""
    for name, is_allowed, message, refusal in _RULES:
        value = body.get(name)
        if value is not None and not is_allowed(value):
            raise refusal(message.format(name=name, value=value), name, value)
    odd = [key for key in body.get("logit_bias") or () if not key.lstrip("-").isdecimal()]
    if odd:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {odd}"
        raise bad_value(message, "logit_bias", odd)
    if (body.get("n") or 1) > 1 and _is_greedy(body.get("temperature")):
        raise bad_request(f"n must be 1 when using greedy sampling, got {body['n']}.")
    if body.get("stream_options") and not body.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")
    if (body.get("prompt_logprobs") or 0) > 0 and body.get("stream"):
        raise bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
