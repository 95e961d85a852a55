"""Whether a stream could go on at another replica after it broke, by its request. Pure.

The rest of an answer is asked for with the answer so far as a part of the prompt. So whatever looks back at the tokens
of the answer alone, or begins with the answer, would look at something else. Fields that nobody here knows may do that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.endpoints import Endpoint

SAMPLING: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logit_bias", "allowed_token_ids"),
        *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
        *("user", "priority", "cache_salt", "vllm_xargs", "request_id", "session_id"),
    }
)
"""Fields that mean the same to the rest of an answer, and to vLLM's chats and completions (vLLM 0.33)."""
_OF_PROMPT: Final = frozenset(
    {
        *("messages", "prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt", "documents"),
        *("continue_final_message", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "reasoning_effort"),
        *("tools", "functions", "parallel_tool_calls"),
    }
)
"""Fields that make the prompt, whose token ids the engine tells."""
_NEUTRAL: Final = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity"),
    }
)
_CHOICES: Final = [
    {"type": kind, **told}
    for kind in ("none", "auto")
    for told in ({}, {"disable_parallel_tool_use": False}, {"disable_parallel_tool_use": True})
]
"""In messages: the engine may call a tool, and need not."""
_HARMLESS: Final[dict[str, Sequence[Any]]] = {
    "n": (1,),
    "best_of": (1,),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto", *_CHOICES),
    "function_call": ("none", "auto"),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "output_config": [{"effort": each} for each in ("low", "medium", "high", "xhigh", "max")],
}
"""Fields that do no harm with one of these values."""
_OF_CHATS: Final = SAMPLING | _OF_PROMPT | _NEUTRAL
_OF_MESSAGES: Final = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "metadata", "service_tier"),
        *("temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "vllm_xargs", "tools"),
    }
)
_OF_RESPONSES: Final = SAMPLING | {
    *("model", "input", "instructions", "max_output_tokens", "stream", "stream_options", "metadata", "service_tier"),
    *("parallel_tool_calls", "max_tool_calls", "safety_identifier", "chat_template_kwargs", "mm_processor_kwargs"),
    *("media_io_kwargs", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "tools"),
}
_KNOWN: Final[dict[str | None, frozenset[str]]] = {
    "chat": _OF_CHATS,
    "completion": _OF_CHATS,
    "message": _OF_MESSAGES,
    "response": _OF_RESPONSES,
}
"""By the kind of prompt: the fields that do no harm."""
_MAX_NAME_CHARS: Final = 64


def why_not_resumed(endpoint: Endpoint, document: Mapping[str, Any]) -> str:
    """Why a stream of this request could not go on elsewhere: `api`, or a field of its body; empty if it could."""
    known = _KNOWN.get(endpoint.prompt)
    if known is None:
        return "api"
    for name, value in document.items():
        if value is None or name in known or value in _HARMLESS.get(name, ()):
            continue
        if not (name == "logprobs" and value is False and endpoint.prompt == "chat"):
            return name[:_MAX_NAME_CHARS]
    prompt = document.get("prompt")
    if endpoint.prompt == "completion" and not (isinstance(prompt, str) or _is_token_ids(prompt)):
        return "prompt"  # several, or embeddings
    return ""


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
