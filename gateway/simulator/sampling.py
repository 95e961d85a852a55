"""The ranges of vLLM's sampling parameters, and the limit of an answer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.simulator.errors import bad_request, bad_value

MAX_LOGPROBS = 20
"""vLLM's --max-logprobs."""
_MAX_SEQUENCES = 16_384
"""vLLM's VLLM_MAX_N_SEQUENCES."""
_GREEDY_BELOW = 1e-5
_MAX_SALT_CHARS = 128


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


def check_sampling(body: dict[str, Any]) -> None:
    """Raises a 400 for the first field of a body whose value is out of range."""
    for name, value in body.items():
        check = _CHECKS.get(name)
        if check is not None and value is not None:
            check(value)
    if (body.get("n") or 1) > 1 and _is_greedy(body.get("temperature")):
        raise bad_request(f"n must be 1 when using greedy sampling, got {body['n']}.")
    if body.get("stream_options") and not body.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")
    if (body.get("prompt_logprobs") or 0) > 0 and body.get("stream"):
        raise bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def _is_greedy(temperature: float | None) -> bool:
    return temperature is not None and temperature < _GREEDY_BELOW


def _temperature(value: float) -> None:
    if value < 0:
        raise bad_value(f"temperature must be non-negative, got {value}.", "temperature", value)
    if value > 2:
        raise bad_value(f"temperature must be in [0, 2], got {value}.", "temperature", value)


def _top_p(value: float) -> None:
    if not 0 < value <= 1:
        raise bad_value(f"top_p must be in (0, 1], got {value}.", "top_p", value)


def _top_k(value: int) -> None:
    if value < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {value}.")


def _min_p(value: float) -> None:
    if not 0 <= value <= 1:
        raise bad_request(f"min_p must be in [0, 1], got {value}.")


def _penalty(name: str) -> Callable[[float], None]:
    def check(value: float) -> None:
        if not -2 <= value <= 2:
            raise bad_request(f"{name} must be in [-2, 2], got {value}.")

    return check


def _repetition_penalty(value: float) -> None:
    if value <= 0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {value}.")


def _n(value: int) -> None:
    if value < 1:
        raise bad_request(f"n must be at least 1, got {value}.")
    if value > _MAX_SEQUENCES:
        hint = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise bad_request(f"n must be at most {_MAX_SEQUENCES}, got {value}. {hint}")


def _min_tokens(value: int) -> None:
    if value < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {value}.")


def _stop(value: str | list[str]) -> None:
    if "" in ([value] if isinstance(value, str) else value):
        raise bad_request("stop cannot contain an empty string.")


def _logit_bias(value: dict[str, float]) -> None:
    odd = [key for key in value if not key.lstrip("-").isdecimal()]
    if odd:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {odd}"
        raise bad_value(message, "logit_bias", odd)


def _allowed_token_ids(value: list[int]) -> None:
    if not value:
        raise bad_value("allowed_token_ids is not None and empty!", "allowed_token_ids", value)


def _prompt_logprobs(value: int) -> None:
    if value < -1:
        raise bad_value("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", value)
    if value > MAX_LOGPROBS or value == -1:
        message = f"Requested prompt logprobs of {value}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise bad_value(message, "prompt_logprobs", value)


def _suffix(_: str) -> None:
    raise bad_request("suffix is only supported for models with FIM completion rendering", "suffix")


def _cache_salt(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise bad_value("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(value) > _MAX_SALT_CHARS or any(char in value for char in "@/\\\0"):
        rule = f"must be at most {_MAX_SALT_CHARS} characters and must not contain '@', '/', '\\\\', or NUL."
        raise bad_value(f"Parameter 'cache_salt' {rule}", "cache_salt")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _min_p,
    "presence_penalty": _penalty("presence_penalty"),
    "frequency_penalty": _penalty("frequency_penalty"),
    "repetition_penalty": _repetition_penalty,
    "n": _n,
    "min_tokens": _min_tokens,
    "stop": _stop,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "prompt_logprobs": _prompt_logprobs,
    "suffix": _suffix,
    "cache_salt": _cache_salt,
}
