"""The fields of inference requests and their types, as in vLLM 0.32, and the check of bodies against them.

Unknown fields are allowed. As in vLLM, the check is pydantic's lax mode (`"4"` is a number, `"yes"` is true), and
errors have the text of vLLM's handler of pydantic's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

from gateway.simulator.errors import UNREADABLE, RequestRefused, bad_value

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
