"""The API paths that KVGate knows. Each path has one record with all that KVGate knows about it.

To add an endpoint, add a record here. Only a new kind of prompt also needs a reader in `gateway/prompt/`. Paths below
`FOLDERS`, and those that the settings allow, go to a replica too; their record is `OTHER`. All others are refused, with
the reason in `REFUSED` if they are known. `make test-vllm` checks that each route of vLLM is decided on.

Sources: the routes of vLLM 0.30 to 0.33, of vLLM-Omni and SGLang, and the API references of OpenAI and Anthropic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

PromptKind = Literal["chat", "completion", "embedding", "response", "message", "tokenize", "rerank", "score"]
"""The form of the prompt in the body. `gateway/prompt/read.py` has a reader for each kind."""
Stored = Literal["responses", "videos", "files", "batches", "audio/voices"]
"""Objects that only the replica has that made them."""
Api = Literal["openai", "openai-responses", "anthropic"]
"""The API whose format errors have."""

_DONE = (b"[DONE]",)
_OF_CHAT = ("max_completion_tokens", "max_tokens")
_OF_AUDIO = ("max_completion_tokens",)
_MESSAGE_STOP = (b"message_stop",)
_RESPONSE_ENDS = (b"response.completed", b"response.failed", b"response.incomplete", b"response.cancelled")
_ENDING_WORDS: Final[dict[Api, tuple[bytes, ...]]] = {
    "openai": (b'"error"',),
    "openai-responses": (b"response.c", b"response.failed", b"response.incomplete", b'"error"'),
    "anthropic": (b"message_", b'"error"'),
}
"""A word costs a search in each piece of a stream, so some words are for more than one event."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API path. The defaults fit a path whose prompt the gateway does not read."""

    path: str
    prompt: PromptKind | None = None
    """The kind of its prompt. None: the gateway does not read the prompt, and the body may be a form."""
    reads_all_of_prompt: bool = True
    """Whether the prompt's reader sees every image in the body. If not, `request/reading/media.py` checks all media."""
    is_pure: bool = True
    """Whether a POST only computes its answer, so that a failed request may be sent to another replica."""
    computes_prompt: bool = True
    """Whether the engine computes the prompt's KV cache (tokenization does not)."""
    api: Api = "openai"
    ends: tuple[bytes, ...] = ()
    """A complete stream ends with an event of one of these kinds (relay/events.py). Empty: it may end anywhere."""
    adds_usage: bool = False
    """Whether the gateway asks for usage at the end of a stream (OpenAI's `stream_options`)."""
    usage_counts_prompt: bool = False
    """Whether the answer's usage counts exactly the tokens of the request's one prompt."""
    reports_blocks: bool = False
    """Whether vLLM accepts `vllm_xargs` on this path. They ask it to report the blocks that a request reuses."""
    sampling_field: str = ""
    """The field that holds the sampling parameters; empty: they are at the top."""
    refused_fields: tuple[str, ...] = ()
    """Fields with digests of media that the engine trusts: a client could read another one's cache with them."""
    takes_cache_salt: bool = True
    """Whether vLLM reads the field `cache_salt` on this path."""
    lacks_cache_salt: bool = False
    """Whether vLLM caches its prompts and cannot keep those of tenants apart."""
    returns_token_ids: bool = False
    """Whether vLLM accepts `return_token_ids` on this path."""
    takes_priority: bool = False
    """Whether vLLM reads the header `X-Vllm-Priority` on this path."""
    stores: Stored | None = None
    """The kind of object that the replica makes here, and then keeps under its id."""
    refers_to: tuple[str, Stored] | None = None
    """A field of the body that names an object, and its kind: only the replica that keeps it can serve the request."""
    token_mark: bytes = b'"delta":'
    """In a stream, each part of a choice has this key once. Most parts are a token."""
    output_limits: tuple[str, ...] | None = None
    """The fields of a body that limit the tokens of one choice, as vLLM reads them: the first one that is set counts.
    Empty: the engine generates nothing. None: it is not known whether it does."""

    # What follows from the others. Each request looks at these several times.
    stores_responses: bool = field(init=False)
    """Whether the answer is a response of OpenAI's API, which the replica may keep (`store`)."""
    is_generated: bool = field(init=False)
    """Whether an engine generates the answer, and says in it whether it has finished."""
    ending_words: tuple[bytes, ...] = field(init=False)
    """Rare words. Each event that says that its engine did not finish has one of them, or a finish reason."""
    label: str = field(init=False)
    """The path in metrics and logs. Other paths share one label, because clients can invent any number of paths."""

    def __post_init__(self) -> None:
        is_generated = self.is_pure and self.computes_prompt
        for name, value in (
            ("stores_responses", self.stores == "responses"),
            ("is_generated", is_generated),
            ("ending_words", _ENDING_WORDS[self.api] if is_generated else ()),
            ("label", self.path if self.prompt is not None else "other"),
        ):
            object.__setattr__(self, name, value)


_RECORDS: Final = (
    Endpoint(
        "/v1/chat/completions",
        "chat",
        ends=_DONE,
        adds_usage=True,
        usage_counts_prompt=True,
        reports_blocks=True,
        returns_token_ids=True,
        takes_priority=True,
        output_limits=_OF_CHAT,
    ),
    Endpoint(
        "/v1/completions",
        "completion",
        ends=_DONE,
        adds_usage=True,
        usage_counts_prompt=True,
        reports_blocks=True,
        returns_token_ids=True,
        takes_priority=True,
        output_limits=("max_tokens",),
        token_mark=b'"text":',
    ),
    Endpoint(
        "/v1/responses",
        "response",
        api="openai-responses",
        ends=_RESPONSE_ENDS,
        usage_counts_prompt=True,
        reports_blocks=True,
        stores="responses",
        refers_to=("previous_response_id", "responses"),
        takes_priority=True,
        output_limits=("max_output_tokens",),
    ),
    Endpoint(
        "/v1/messages",
        "message",
        api="anthropic",
        ends=_MESSAGE_STOP,
        reports_blocks=True,
        output_limits=("max_tokens",),
    ),
    # The reader reads only the first of a batch of conversations.
    Endpoint("/v1/embeddings", "embedding", reads_all_of_prompt=False, output_limits=()),
    Endpoint("/v1/rerank", "rerank", output_limits=()),
    Endpoint("/v2/rerank", "rerank", output_limits=()),
    Endpoint("/rerank", "rerank", output_limits=()),
    # A score has four ways to name its two sides. The engine may use another one than the reader.
    Endpoint("/v1/score", "score", reads_all_of_prompt=False, output_limits=()),
    Endpoint("/score", "score", reads_all_of_prompt=False, output_limits=()),
    Endpoint("/tokenize", "tokenize", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/detokenize", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/tokenizer_info", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/v2/embed", output_limits=(), takes_cache_salt=False, lacks_cache_salt=True),
    Endpoint("/classify", output_limits=()),
    Endpoint("/pooling", output_limits=()),
    Endpoint("/v1/chat/completions/batch", output_limits=_OF_CHAT),
    Endpoint("/v1/chat/completions/render", computes_prompt=False),
    Endpoint("/v1/chat/completions/derender", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/v1/completions/render", computes_prompt=False),
    Endpoint("/v1/completions/derender", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/v1/messages/count_tokens", computes_prompt=False, api="anthropic", takes_cache_salt=False),
    Endpoint("/v1/messages/render", computes_prompt=False, api="anthropic"),
    Endpoint("/v1/responses/render", computes_prompt=False),
    Endpoint("/v1/systemone"),
    Endpoint("/v1/decisions", output_limits=()),
    Endpoint("/generative_scoring", output_limits=()),
    Endpoint(
        "/inference/v1/generate",
        sampling_field="sampling_params",
        refused_fields=("features",),
        output_limits=("max_tokens",),
    ),
    Endpoint("/invocations"),
    Endpoint("/cohere/v2/chat", takes_cache_salt=False, lacks_cache_salt=True),
    Endpoint("/cohere/v2/chat/render", computes_prompt=False, takes_cache_salt=False),
    Endpoint("/v1/audio/speech", takes_cache_salt=False, refers_to=("voice", "audio/voices")),
    Endpoint("/v1/audio/voices", is_pure=False, takes_cache_salt=False, stores="audio/voices"),
    Endpoint("/v1/videos", is_pure=False, takes_cache_salt=False, stores="videos"),
    Endpoint("/v1/files", is_pure=False, takes_cache_salt=False, stores="files"),
    Endpoint(
        "/v1/batches", is_pure=False, takes_cache_salt=False, stores="batches", refers_to=("input_file_id", "files")
    ),
    Endpoint("/v1/audio/transcriptions", output_limits=_OF_AUDIO, takes_cache_salt=False),
    Endpoint("/v1/audio/translations", output_limits=_OF_AUDIO, takes_cache_salt=False),
    Endpoint("/v1/images/edits", takes_cache_salt=False),
    Endpoint("/v1/images/generations", takes_cache_salt=False),
    Endpoint("/v1/images/variations", takes_cache_salt=False),
    Endpoint("/v1/moderations", takes_cache_salt=False),
)
ENDPOINTS: Final = {record.path: record for record in _RECORDS}
"""The records by path."""
OTHER: Final = Endpoint("", is_pure=False, takes_cache_salt=False)
"""The record of any other path. What its requests do is unknown."""
_OTHER_ANTHROPIC: Final = Endpoint("", is_pure=False, api="anthropic", takes_cache_salt=False)


def endpoint_of(path: str) -> Endpoint:
    """The record of a path."""
    known = ENDPOINTS.get(path)
    if known is not None:
        return known
    return _OTHER_ANTHROPIC if path.startswith("/v1/messages/") else OTHER


FOLDERS: Final = tuple(f"/v1/{kind}/" for kind in get_args(Stored))
"""What lies below these paths goes to a replica: objects, by their ids."""
_ADMINISTRATION = (
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/collective_rpc",
    "/fault_tolerance",
    "/finish_weight_update",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights",
    "/wake_up",
    "/weight_checker",
)
_ADMINISTERS = "it administers an engine; send it to the replica itself"
_TELLS = "it tells of one engine; ask the replica itself"
_ADAPTERS = "adapters are loaded and unloaded at each replica; then its models are read again"
REFUSED: Final = {
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/v1/realtime": "it is for WebSockets, which are not passed on",
    "/ping": "ask /health",
    "/readyz": "ask /ready",
    "/docs": "it is a page of the replica",
    "/static": "it is a page of the replica",
    **dict.fromkeys(
        ("/is_paused", "/is_sleeping", "/kv_event_sources", "/load", "/server_info", "/weight_info"), _TELLS
    ),
    **dict.fromkeys(_ADMINISTRATION, _ADMINISTERS),
}
"""Paths of engines that clients do not reach, with what lies below them, and why."""
OWN_PATHS: Final = frozenset(
    {
        *("/v1/models", "/v1/route/explain", "/v1/replicas", "/v1/demand", "/v1/queue"),
        *("/v1/keys", "/v1/audit", "/v1/budgets", "/v1/usage"),
    }
)
"""The gateway itself answers these, what lies below them, GET /v1/decisions, and what lies below that."""
OF_EACH_REPLICA: Final = frozenset({"/health", "/metrics", "/version"})
"""A gateway answers these for itself, as each replica does. A proxy that asks a picker gets a replica's."""
