"""The fields of inference requests, their types and ranges, as in vLLM 0.32, and the check of bodies against them.

Unknown fields are allowed. As in vLLM, the check is pydantic's lax mode (`"4"` is a number, `"yes"` is true).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic does not take typing's before Python 3.12

from gateway.simulator.errors import bad_request

_MAX_LOGPROBS = 20
"""vLLM's --max-logprobs."""
_MAX_SEQUENCES = 16_384
"""vLLM's VLLM_MAX_N_SEQUENCES."""
_MAX_STOP_STRINGS = 4
"""vLLM's VLLM_MAX_STOP_STRINGS."""
_GREEDY_BELOW = 1e-5

_Checked = TypeVar("_Checked")
Parse = Callable[[dict[str, Any]], dict[str, Any]]

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_StopString = Annotated[str, Field(min_length=1)]
_StopStrings = Annotated[list[_StopString], Field(max_length=_MAX_STOP_STRINGS)]
_Token = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=1, le=_MAX_SEQUENCES)]
_Logprobs = Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Xargs = dict[str, str | int | float | list[str | int | float]]


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
    temperature: Annotated[float, Field(ge=0, le=2)] | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    top_k: Annotated[int, Field(ge=-1)] | None
    vllm_xargs: _Xargs | None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: dict[str, Any] | None


class _Sampled(_Request, total=False):
    """The other common fields of chat, completions and Responses."""

    model: str | None
    min_p: Annotated[float, Field(ge=0, le=1)] | None
    repetition_penalty: Annotated[float, Field(gt=0)] | None
    presence_penalty: _Penalty | None
    frequency_penalty: _Penalty | None
    logit_bias: dict[int, float] | None
    seed: _Int64 | None
    stop: _StopString | _StopStrings | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    user: str | None
    priority: _Int64
    request_id: str
    session_id: str | None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None
    structured_outputs: _StructuredOutputs | None


class _OpenAi(_Sampled, total=False):
    """The common fields of chat and completions."""

    max_tokens: int | None
    min_tokens: Annotated[int, Field(ge=0)]
    stream_options: _StreamOptions | None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None
    bad_words: list[str]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None
    response_format: _ResponseFormat | None
    return_token_ids: bool | None


class ChatRequest(_OpenAi, total=False):
    messages: Required[list[dict[str, Any]]]
    max_completion_tokens: int | None
    n: _Count | None
    logprobs: bool | None
    top_logprobs: _Logprobs | None
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
    suffix: None
    n: _Count
    logprobs: _Logprobs | None


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
    strict: NotRequired[bool | None]
    defer_loading: NotRequired[bool | None]


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
    model: Required[Annotated[str, Field(min_length=1)]]
    messages: Required[list[_Message]]
    system: str | list[dict[str, Any]] | None
    tools: list[_MessagesTool] | None
    tool_choice: Annotated[_MessagesChoice, AfterValidator(_named)] | None
    chat_template_kwargs: dict[str, Any] | None


class MessagesRequest(CountTokensRequest, total=False):
    max_tokens: Required[Annotated[int, Field(gt=0)]]
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


def parser(request_type: Any) -> Parse:
    """Checks a body against a type. Returns it with converted fields, or raises a 400."""
    adapter = TypeAdapter(request_type)
    return lambda body: {**body, **checked(adapter, body)}  # in the order of the body


def checked(adapter: TypeAdapter[_Checked], body: object) -> _Checked:
    """The body in the adapter's type. Raises a 400."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise bad_request(f"{where}: {first['msg']}", where) from error


def token_limit(max_tokens: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens an answer may have, if the request limits it to `max_tokens`: at most the rest of the model's
    length. Raises a 400."""
    if max_tokens is not None and not 1 <= max_tokens <= max_model_len:
        raise bad_request(f"max_tokens must be from 1 to {max_model_len}, got {max_tokens}", "max_tokens")
    room = max_model_len - prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


def check_together(body: dict[str, Any]) -> None:
    """Raises a 400 if fields of a chat or completions body do not fit together."""
    temperature = body.get("temperature")
    if (body.get("n") or 1) > 1 and temperature is not None and temperature < _GREEDY_BELOW:
        raise bad_request(f"n must be 1 when using greedy sampling, got {body['n']}", "n")
    if body.get("stream_options") and not body.get("stream"):
        raise bad_request("stream_options need stream", "stream_options")
