"""The API paths that KVGate knows, with everything that it knows of each: one record a path.

To add an endpoint, add a record here. Only a prompt of a new kind needs more: a reader in `gateway/prompt/`. A path
under /v1/ without a record is passed on to a replica as well, as `OTHER`.

Sources: the routes of vLLM 0.30 to 0.32, and the API references of OpenAI and Anthropic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PromptKind = Literal["chat", "completion", "embedding", "response", "message", "tokenize", "rerank", "score"]
"""How a prompt is written in the body: `gateway/prompt/read.py` has a reader for each."""
Api = Literal["openai", "openai-responses", "anthropic"]
"""Whose shape errors have."""

_DONE = (b"data: [DONE]", b"data:[DONE]")
_MESSAGE_STOP = (b"event: message_stop", b"event: error")
_RESPONSE_ENDS = (
    b"event: response.completed",
    b"event: response.failed",
    b"event: response.incomplete",
    b"event: response.cancelled",
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API path. The defaults are those of a path whose prompt is not read."""

    path: str
    prompt: PromptKind | None = None
    """The kind of its prompt. None: the body is passed on without a look at its prompt, and may be a form."""
    reads_all_of_prompt: bool = True
    """Whether the prompt's reader sees every image in the body. Where it does not, all media are checked apart."""
    needs_model: bool = False
    """Whether a body without `model` is refused. Otherwise the only model that is served is meant."""
    is_pure: bool = True
    """Whether a POST only computes its answer, so that another replica may be asked after a failure."""
    computes_prompt: bool = True
    """Whether the engine computes the prompt's KV cache (tokenization does not)."""
    api: Api = "openai"
    end_marks: tuple[bytes, ...] = ()
    """Beginnings of the line with which a complete stream ends. Empty: a stream may end anywhere."""
    adds_usage: bool = False
    """Whether streams are asked to end with their usage (OpenAI's `stream_options`)."""
    usage_counts_prompt: bool = False
    """Whether the answer's usage counts exactly the tokens of the one prompt."""
    reports_blocks: bool = False
    """Whether vLLM takes `vllm_xargs` there, by which a request asks for a report of the blocks that it reuses."""
    returns_token_ids: bool = False
    """Whether vLLM takes `return_token_ids` there."""
    stores_responses: bool = False
    """Whether the replica keeps the answer under an id (OpenAI's `store`)."""

    @property
    def label(self) -> str:
        """The path in metrics and logs: clients can invent paths without end."""
        return self.path if self.prompt is not None else "other"


_RECORDS: Final = (
    Endpoint(
        "/v1/chat/completions",
        "chat",
        needs_model=True,
        end_marks=_DONE,
        adds_usage=True,
        usage_counts_prompt=True,
        reports_blocks=True,
        returns_token_ids=True,
    ),
    Endpoint(
        "/v1/completions",
        "completion",
        needs_model=True,
        end_marks=_DONE,
        adds_usage=True,
        usage_counts_prompt=True,
        reports_blocks=True,
        returns_token_ids=True,
    ),
    Endpoint(
        "/v1/responses",
        "response",
        needs_model=True,
        api="openai-responses",
        end_marks=_RESPONSE_ENDS,
        usage_counts_prompt=True,
        reports_blocks=True,
        stores_responses=True,
    ),
    Endpoint(
        "/v1/messages",
        "message",
        needs_model=True,
        api="anthropic",
        end_marks=_MESSAGE_STOP,
        reports_blocks=True,
    ),
    # Of a batch of conversations to embed, only the first is read.
    Endpoint("/v1/embeddings", "embedding", needs_model=True, reads_all_of_prompt=False),
    Endpoint("/v1/rerank", "rerank", needs_model=True),
    Endpoint("/rerank", "rerank", needs_model=True),
    # A score names its two sides in one of four ways, and the engine may take another than the one that is read.
    Endpoint("/v1/score", "score", needs_model=True, reads_all_of_prompt=False),
    Endpoint("/score", "score", needs_model=True, reads_all_of_prompt=False),
    Endpoint("/tokenize", "tokenize", computes_prompt=False),
    Endpoint("/detokenize"),
    Endpoint("/classify"),
    Endpoint("/pooling"),
    Endpoint("/v1/chat/completions/batch"),
    Endpoint("/v1/chat/completions/render"),
    Endpoint("/v1/chat/completions/derender"),
    Endpoint("/v1/completions/render"),
    Endpoint("/v1/completions/derender"),
    Endpoint("/v1/messages/count_tokens", api="anthropic"),
    Endpoint("/v1/messages/render", api="anthropic"),
    Endpoint("/v1/responses/render"),
    Endpoint("/v1/systemone"),
    Endpoint("/v1/audio/speech"),
    Endpoint("/v1/audio/transcriptions"),
    Endpoint("/v1/audio/translations"),
    Endpoint("/v1/images/edits"),
    Endpoint("/v1/images/generations"),
    Endpoint("/v1/moderations"),
)
ENDPOINTS: Final = {record.path: record for record in _RECORDS}
"""By path."""
OTHER: Final = Endpoint("", is_pure=False)
"""Any other path: nobody knows what its requests do."""
_OTHER_ANTHROPIC: Final = Endpoint("", is_pure=False, api="anthropic")


def endpoint_of(path: str) -> Endpoint:
    """The record of a path."""
    known = ENDPOINTS.get(path)
    if known is not None:
        return known
    return _OTHER_ANTHROPIC if path.startswith("/v1/messages/") else OTHER


def is_proxied(path: str) -> bool:
    """Whether requests to a path go to a replica; the gateway answers all others itself."""
    return path in ENDPOINTS or (
        path.startswith("/v1/") and path not in _OWN_PATHS and not path.startswith("/v1/models/")
    )


_OWN_PATHS: Final = frozenset({"/v1/models", "/v1/route/explain"})
