"""Reads the prompt of a parsed request body: chooses the API's reader and the root of its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.endpoints import PromptKind, endpoint_of
from gateway.errors import bad_field
from gateway.prompt.anthropic import read_anthropic
from gateway.prompt.chat import read_chat
from gateway.prompt.fields import utf8
from gateway.prompt.plain import read_completion, read_embedding, read_rerank, read_score, read_tokenize
from gateway.prompt.prompt import Prompt, PromptLimits
from gateway.prompt.responses import read_responses
from gateway.prompt.root import CacheScope
from gateway.prompt.steps import UNBOUNDED, Steps
from gateway.prompt.writer import PromptWriter

_READERS: Final[dict[PromptKind, Callable[[PromptWriter, dict[str, Any], CacheScope], None]]] = {
    "chat": read_chat,
    "completion": read_completion,
    "embedding": read_embedding,
    "response": read_responses,
    "message": read_anthropic,
    "tokenize": read_tokenize,
    "rerank": read_rerank,
    "score": read_score,
}


def read_prompt(
    path: str,
    body: dict[str, Any],
    *,
    root_model: str,
    adapter: str | None,
    cache_salt: str | None,
    limits: PromptLimits,
    steps: Steps | None = None,
    changed_parts: list[dict[str, Any]] | None = None,
) -> Prompt:
    """Read the prompt of a request to `path`. If the path has no prompt, the result has no keys.

    `root_model`, `adapter` and `cache_salt` are the engine's view: the base model that every alias shares, the LoRA
    adapter, and the salt that will be sent (`body["cache_salt"]` is not read).

    `body` is edited in place (`body_changed`): the client's media uuids are dropped, and data: images in chat messages
    get the gateway's own. `changed_parts` gets the parts where that was done. Raises ApiError 400, which names the
    field, for bad input, and TooManySteps if reading takes more than `steps`.
    """
    kind = endpoint_of(path).prompt
    model = body.get("model")
    if kind is None:
        sample = root_model.encode(errors="replace")
        return Prompt(model if isinstance(model, str) else "", [], [], [], [], sample, body_changed=False)
    if not utf8(model, "model"):
        raise bad_field("model", "must name a model")
    writer = PromptWriter(limits, steps or Steps(UNBOUNDED), changed_parts)
    _READERS[kind](writer, body, CacheScope(root_model, adapter, cache_salt))
    return writer.prompt(str(model))
