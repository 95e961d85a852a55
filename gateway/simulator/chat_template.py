"""The replica's chat template: from messages to a prompt. Every piece begins with a new token, so that the prompt of
a conversation's next turn starts with the tokens of this turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.simulator import fields
from gateway.simulator.errors import bad_request
from gateway.simulator.images import ImageReader
from gateway.simulator.prompt import EnginePrompt, PromptBuilder

_START, _END = "<|im_start|>", "<|im_end|>\n"
_RENDERED_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_SPEAKERS = ("user", "system", "developer")
"""The roles whose messages may lack `content`, but may not set it to null."""
_IMAGE_PARTS = {"image_url", "input_image"}


def render_chat(
    messages: list[Any],
    images: ImageReader,
    *,
    tools: Sequence[Any] = (),
    template_kwargs: dict[str, Any] | None = None,
    generation_prompt: bool = True,
    continue_final_message: bool = False,
    lora: str | None = None,
    cache_salt: str | None = None,
) -> EnginePrompt:
    """Raises a 400 for messages that no template can render."""
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    builder = PromptBuilder()
    for title, settings in (("tools", tools), ("chat_template_kwargs", template_kwargs)):
        if settings:
            builder.line(f"{_START}{title}\n")
            builder.text(orjson.dumps(settings).decode())
            builder.line(_END)
    for at, message in enumerate(messages):
        _render_message(builder, fields.as_mapping(message, f"messages.{at}"), images)
        if not (continue_final_message and at == len(messages) - 1):
            builder.line(_END)
    if generation_prompt:
        builder.line(f"{_START}assistant\n")
    return builder.build(lora, cache_salt)


def _render_message(builder: PromptBuilder, message: dict[str, Any], images: ImageReader) -> None:
    role = fields.required_text(message, "role")
    builder.line(f"{_START}{role}\n")
    for name in _RENDERED_FIELDS:
        if value := fields.text(message, name):
            builder.line(f"{name}: {value}\n")
    content = message.get("content")
    if isinstance(content, str):
        builder.text(content)
    elif content is not None:
        for part in fields.sequence(message, "content"):
            _render_part(builder, part, images)
    elif "content" in message and role in _SPEAKERS:
        raise bad_request("content: Input should be a valid string", "content")
    if calls := fields.sequence(message, "tool_calls"):
        builder.end_token()
        builder.text(orjson.dumps(calls, option=orjson.OPT_SORT_KEYS).decode())


def _render_part(builder: PromptBuilder, part: object, images: ImageReader) -> None:
    if isinstance(part, str):
        builder.text(part)
        return
    part = fields.as_mapping(part, "content")
    kind = fields.required_text(part, "type")
    if kind in _TEXTS:
        builder.text(fields.required_text(part, _TEXTS[kind]))
    elif kind in _IMAGE_PARTS:
        source = part.get("image_url")
        url = source if isinstance(source, str) else fields.text(fields.mapping(part, "image_url"), "url")
        builder.image(images.read(url, fields.text(part, "uuid")))
    else:
        raise bad_request(f"Unknown part type: {kind}", "messages")
