"""The fields of inference requests, their types and ranges, as in vLLM 0.32, and the check of bodies against them.

Unknown fields are allowed. As in vLLM, the check is pydantic's lax mode (`"4"` is a number, `"yes"` is true), and
errors have the text of vLLM's handler of pydantic's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

from gateway.simulator.errors import UNREADABLE, RequestRefused, bad_request, bad_value

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
_MAX_STOP_STRINGS = 4
"""vLLM's VLLM_MAX_STOP_STRINGS."""

_MAX_REPORTED = 10
_MAX_INPUT_CHARS = 200
_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
"""pydantic's names of the branches of a union in an error's path. vLLM leaves them out."""

_Checked = TypeVar("_Checked")
Parse = Callable[[dict[str, Any]], dict[str, Any]]

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_StopStrings = Annotated[list[str], Field(max_length=_MAX_STOP_STRINGS)]
_Token = Annotated[int, Field(ge=0)]
_Xargs = dict[str, str | int | float | list[str | int | float]]


def _number(name: str) -> BeforeValidator:
    """A field that vLLM compares before it reads it."""

    def check(value: object) -> object:
        if value is not None and not isinstance(value, int | float):
            raise bad_value(f"`{name}` must be an integer.", name, value)
        return value

    return BeforeValidator(check)


class _Open(TypedDict):
    """An object whose unknown fields are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class _StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    continuous_usage_stats: bool | None


class _JsonSchema(TypedDict):
    name: str
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class _ResponseFormat(_Open):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NotRequired[_JsonSchema | None]


class _StructuredOutputs(TypedDict, total=False):
    json: str | dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool | None
    structural_tag: str | None


class _Function(_Open):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class _Tool(_Open):
    function: _Function
    type: NotRequired[Literal["function"]]


class _Request(_Open, total=False):
    """The fields of every API."""

    stream: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    vllm_xargs: _Xargs | None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: dict[str, Any] | None


class _Sampled(_Request, total=False):
    """The other common fields of chat, completions and Responses."""

    model: str | None
    min_p: float | None
    repetition_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: _Int64 | None
    stop: str | _StopStrings | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    user: str | None
    priority: _Int64
    request_id: str
    session_id: str | None
    structured_outputs: _StructuredOutputs | None


class _OpenAi(_Sampled, total=False):
    """The common fields of chat and completions."""

    max_tokens: int | None
    min_tokens: int
    frequency_penalty: float | None
    presence_penalty: float | None
    stream_options: _StreamOptions | None
    echo: bool
    prompt_logprobs: Annotated[int | None, _number("prompt_logprobs")]
    allowed_token_ids: list[int] | None
    bad_words: list[str]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None
    response_format: _ResponseFormat | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None


class ChatRequest(_OpenAi, total=False):
    messages: Required[list[dict[str, Any]]]
    max_completion_tokens: int | None
    n: int | None
    logprobs: bool | None
    top_logprobs: Annotated[int | None, _number("top_logprobs")]
    tools: list[_Tool] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, str]] | None


class CompletionRequest(_OpenAi, total=False):
    prompt: list[_Token] | list[list[_Token]] | str | list[str] | None
    suffix: str | None
    n: int
    logprobs: Annotated[int | None, _number("logprobs")]


def _not_empty(model: str) -> str:
    if not model:
        raise ValueError("Model is required")
    return model


def _positive(max_tokens: int) -> int:
    if max_tokens <= 0:
        raise ValueError("max_tokens must be positive")
    return max_tokens


class _MessagesChoice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str | None]


def _named(choice: _MessagesChoice) -> _MessagesChoice:
    if choice["type"] == "tool" and not choice.get("name"):
        raise ValueError("tool_choice.name is required when type is 'tool'")
    return choice


class _MessagesTool(TypedDict):
    name: str
    description: NotRequired[str | None]
    input_schema: dict[str, Any]


class _Message(_Open):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _MessagesFormat(TypedDict, total=False):
    schema: dict[str, Any] | None
    type: Literal["json_schema"]


class _OutputConfig(TypedDict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
    format: _MessagesFormat | None


class CountTokensRequest(_Request, total=False):
    model: Required[Annotated[str, AfterValidator(_not_empty)]]
    messages: Required[list[_Message]]
    system: str | list[dict[str, Any]] | None
    tools: list[_MessagesTool] | None
    tool_choice: Annotated[_MessagesChoice, AfterValidator(_named)] | None
    chat_template_kwargs: dict[str, Any] | None


class MessagesRequest(CountTokensRequest, total=False):
    max_tokens: Required[Annotated[int, AfterValidator(_positive)]]
    stop_sequences: _StopStrings | None
    metadata: dict[str, Any] | None
    output_config: _OutputConfig | None


class _TextFormat(_Open):
    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]


class _TextConfig(_Open, total=False):
    format: _TextFormat | None


_Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


class ResponsesRequest(_Sampled, total=False):
    input: Required[str | list[Any]]
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    store: bool | None
    background: bool | None
    metadata: dict[str, Any] | None
    include: list[_Included] | None
    top_logprobs: int | None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool | None
    text: _TextConfig | None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None


def parser(request_type: Any) -> Parse:
    """Checks a body against a type. Returns it with converted fields, or raises a 400."""
    adapter = TypeAdapter(request_type)
    return lambda body: {**body, **checked(adapter, body)}  # in the order of the body


def checked(adapter: TypeAdapter[_Checked], body: object) -> _Checked:
    """The body in the adapter's type. Raises a 400."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from error


def unreadable(kind: str, loc: tuple[int | str, ...], message: str, value: object) -> RequestRefused:
    """The 400 for a body that is no object, with the same text."""
    return _refusal([ErrorDetails(type=kind, loc=loc, msg=message, input=value)])


def _refusal(errors: Sequence[ErrorDetails]) -> RequestRefused:
    """The 400 for a body of a wrong type, with the text of vLLM's handler of pydantic's errors."""
    param = _path(errors[0]["loc"])
    lines = [str({**error, "loc": _path(error["loc"]), "input": _shown(error["input"])}) for error in errors]
    word = "error" if len(errors) == 1 else "errors"
    message = f"{len(errors)} validation {word}:\n" + "\n".join(f"  {line}" for line in lines[:_MAX_REPORTED])
    if len(errors) > _MAX_REPORTED:
        message += f"\n  ...and {len(errors) - _MAX_REPORTED} more {word}"
    return RequestRefused(400, message, param, UNREADABLE)


def _path(loc: Sequence[int | str]) -> str:
    parts = (str(part) for part in loc)
    return ".".join(["body", *(part for part in parts if "[" not in part and part not in _BRANCHES)])


def _shown(value: object) -> str:
    """A value as an error quotes it. Of a list or an object, only the length is quoted."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_INPUT_CHARS else text[:_MAX_INPUT_CHARS] + "...[truncated]"


def token_limit(max_tokens: int | None, name: str, prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens an answer to a prompt may have, if the request's field `name` is `max_tokens`: at most what the
    model's length leaves. Raises a 400."""
    if max_tokens is not None and max_tokens < 1:
        raise bad_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if max_tokens is not None and max_tokens > max_model_len:
        message = f"{name}={max_tokens} cannot be greater than max_model_len={max_model_len}."
        raise bad_value(f"{message} Please request fewer output tokens.", name, max_tokens)
    room = max_model_len - prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


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
