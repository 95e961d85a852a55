"""Content parts of a chat message: text, images and other media.

Every `uuid` that a client sets on a part is dropped: the engine would use it as the identity of the medium, and could
answer from another picture's KV cache. A data: image gets a uuid of the gateway's instead.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import bad_field
from gateway.prompt import stream as tags
from gateway.prompt.fields import Json, object_at
from gateway.prompt.writer import PromptWriter

# The type of a text part, and the field that holds its text.
_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# The type of a media part, and the field that holds its data, in the order in which the engine looks for them in a part
# without a type. Only the data of a media part counts.
_MEDIA_FIELDS: Final = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_embeds": "image_embeds",
    "audio_embeds": "audio_embeds",
    "video_embeds": "video_embeds",
    "prompt_embeds": "data",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "video_url": "video_url",
    "file": "file",
}

# Claude Code's first system line has a value that is new in every request. The engine drops the line. A key that
# contained it would never occur twice.
BILLING_HEADER: Final = "x-anthropic-billing-header"


def write_parts(writer: PromptWriter, parts: list[Json], param: str, *, role: str) -> None:
    """The content of a message. `param` names it in errors."""
    writer.expect_parts(len(parts), param)
    for index, part in enumerate(parts):
        write_part(writer, part, f"{param}[{index}]", role=role)


def write_part(writer: PromptWriter, part: Json, param: str, *, role: str) -> None:
    """One content part. A bare string is a text."""
    if isinstance(part, str):
        write_content_text(writer, role, part, param)
        return
    had_uuid = writer.drop_uuid(object_at(part, param))
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _MEDIA_FIELDS if name in part), None)
    if not isinstance(kind, str):
        raise bad_field(f"{param}.type", "must be a string")
    if (field := _TEXT_FIELDS.get(kind)) is not None:
        written = write_content_text(writer, role, part.get(field), f"{param}.{field}")
        if written and len(part) > 2:
            writer.other_fields(tags.PART_FIELD, part, frozenset({"type", field}), param)
    elif (field := _MEDIA_FIELDS.get(kind)) is not None:
        if part.get(field) is None:
            message = "send the data: a media id alone is not accepted" if had_uuid else "is required"
            raise bad_field(f"{param}.{field}", message)
        _write_medium(writer, part, kind, field, param)
    else:
        writer.unknown_part(part, param)


def write_content_text(writer: PromptWriter, role: str, text: Json, param: str) -> bool:
    """A text of a message. Returns False if the engine drops all of it."""
    if role == "system" and isinstance(text, str) and text.startswith(BILLING_HEADER):
        text = text.partition("\n")[2]
        if not text:
            return False
    writer.text(text, param)
    return True


def drop_uuids(writer: PromptWriter, messages: Json) -> None:
    """Drop the clients' uuids from messages that the engine reads but that add no key."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        writer.steps.take(1 + (len(content) if isinstance(content, list) else 0))
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                writer.drop_uuid(part)


def _write_medium(writer: PromptWriter, part: dict[str, Json], kind: str, field: str, param: str) -> None:
    payload, at = part[field], f"{param}.{field}"
    if not field.endswith("_url"):
        writer.media(kind, payload, at)
        return
    if isinstance(payload, dict):
        payload, at = payload.get("url"), f"{at}.url"
    if not isinstance(payload, str):
        raise bad_field(at, "must be a string: send the data or a URL")
    if field != "image_url":
        writer.media_url(kind, payload, at)
    else:
        identity = writer.image(payload, at)
        if identity.is_data and writer.pins_images:
            writer.pin_image(part, identity)
