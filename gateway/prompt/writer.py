"""Writes the messages, parts and tools of a request as tokens of its stream."""

from __future__ import annotations

from typing import Final

import orjson
from blake3 import blake3

from gateway.errors import bad_field
from gateway.prompt import stream as tags
from gateway.prompt.fields import (
    IGNORED_FIELDS,
    Json,
    object_at,
    optional_utf8,
    ordered_json,
    sorted_json,
    utf8,
)
from gateway.prompt.images import ImageIdentity, identify_image, media_url_digest
from gateway.prompt.prompt import Prompt, PromptLimits
from gateway.prompt.steps import Steps
from gateway.prompt.stream import PromptStream, frame

MAX_MESSAGES: Final = 16_384
"""Messages of a conversation, items of a response's input, or documents to rank. Each costs up to 5 us, so all of them
less than 0.1 s."""
MAX_CONTENT_PARTS: Final = 16_384
"""Of all messages together."""
_SAMPLE_BYTES: Final = 2048
_MAX_PARSED_CHARS: Final = 65_536
"""Longer arguments are written as they are spelled. Parsing them would cost an unknown number of steps."""
_CHARS_PER_STEP: Final = 64
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_ROLE_FRAMES: Final = {
    role: frame(tags.MESSAGE, role.encode()) for role in ("system", "user", "assistant", "tool", "developer")
}


class PromptWriter:
    """Writes one request's stream, and keeps the other facts of its prompt.

    `pins_images`: the engine reads the `uuid` of image parts in this API, so the gateway sets it for data: images.
    """

    __slots__ = (
        "_answer",
        "_answered",
        "_first_media",
        "_parts",
        "_sample",
        "_samples",
        "_seed",
        "changed_parts",
        "limits",
        "pins_images",
        "steps",
        "stream",
    )

    def __init__(self, limits: PromptLimits, steps: Steps, changed_parts: list[dict[str, Json]] | None = None) -> None:
        self.stream = PromptStream()
        self.limits = limits
        self.steps = steps
        self._parts = 0
        self.pins_images = False
        self.changed_parts: list[dict[str, Json]] = [] if changed_parts is None else changed_parts
        """Gets the parts of the body whose uuid was set or dropped."""
        self._seed = b""
        self._first_media = b""
        self._answered = ""  # the key before the answer that is written now
        self._answer = "", ""  # the keys before and at the end of the last answer
        self._sample = bytearray()  # the beginning of the first message that is not the system's
        self._samples = False  # whether text written now belongs to the sample

    def end_root(self) -> None:
        """The root is complete; messages, or the prompt's text, follow."""
        self._seed = self.stream.digest()
        self._samples = True

    def expect_messages(self, count: int, param: str) -> None:
        """`count` messages follow. Raises a 400 if these are too many, and TooManySteps."""
        if count > MAX_MESSAGES:
            raise bad_field(param, f"has {count} entries; at most {MAX_MESSAGES} are allowed", "limit_exceeded")
        self.steps.take(count)

    def expect_parts(self, count: int, param: str) -> None:
        """A list of `count` content parts follows. Raises a 400 if all lists together have too many, and
        TooManySteps."""
        self._parts += count
        if self._parts > MAX_CONTENT_PARTS:
            message = f"brings the request to {self._parts} content parts; at most {MAX_CONTENT_PARTS} are allowed"
            raise bad_field(param, message, "limit_exceeded")
        self.steps.take(count)

    def open_message(self, role: Json, param: str) -> str:
        """Start a message of `role`, and return the role. `param` names it in errors."""
        if not isinstance(role, str):
            raise bad_field(param, "must be a string")
        self._answered = (self._answered or self.stream.key_here()) if role == "assistant" else ""
        known = _ROLE_FRAMES.get(role)
        self.stream.framed(known or frame(tags.MESSAGE, utf8(role, param)))
        self._samples = role not in _SYSTEM_ROLES and not self._sample
        return role

    def close_message(self, *, keyed: bool) -> None:
        """End a message, and a key if `keyed`."""
        self.stream.framed(tags.MESSAGE_END)
        if keyed:
            self.stream.boundary()
            if self._answered:
                self._answer = self._answered, self.stream.keys[-1]

    def text(self, value: Json, param: str) -> None:
        """A text of the message's content."""
        data = utf8(value, param)
        self.stream.text(data, tags.TEXT)
        if self._samples:
            self._take_sample(data)

    def token_ids(self, data: bytes) -> None:
        """A prompt of 4-byte token ids."""
        self.stream.token_ids(data)
        self._take_sample(data)

    def image(self, url: str, param: str) -> ImageIdentity:
        """An image of the message's content, given as a data: or http(s) URL."""
        identity = identify_image(url, param, self.limits)
        self.identified_image(identity)
        return identity

    def pin_image(self, part: dict[str, Json], identity: ImageIdentity) -> None:
        """Set the uuid of the image in `part` to its digest. The engine then names the image by it."""
        part["uuid"] = identity.digest.hex()
        self.changed_parts.append(part)

    def identified_image(self, identity: ImageIdentity) -> None:
        """An image of the message's content."""
        self._first_media = self._first_media or identity.digest
        tag = tags.IMAGE if identity.is_data else tags.IMAGE_URL
        self.stream.image(tag, identity.digest, identity.size)

    def media(self, kind: str, payload: Json, param: str) -> None:
        """Any other medium of the message's content, as the digest of its canonical JSON."""
        digest = blake3(sorted_json(payload, param)).digest()
        self._first_media = self._first_media or digest
        self.stream.media(utf8(kind, param), digest)

    def media_url(self, kind: str, url: str, param: str) -> None:
        """A video or audio URL of the message's content. Its data is not decoded, unlike that of an image."""
        if url[:5].lower() != "data:":
            media_url_digest(url, param, self.limits)
        self.media(kind, url, param)

    def unknown_part(self, part: dict[str, Json], param: str) -> None:
        """A content part of an unknown type, as JSON."""
        kept = {key: value for key, value in part.items() if key not in IGNORED_FIELDS and value is not None}
        self.stream.text(sorted_json(kept, param), tags.PART)

    def other_fields(self, tag: bytes, fields: dict[str, Json], known: frozenset[str], param: str) -> None:
        """All non-null fields that are neither `known` nor ignored, sorted by key."""
        if fields.keys() <= known:
            return
        self.steps.take(len(fields))
        for key in sorted(fields.keys() - known - IGNORED_FIELDS):
            if (value := fields[key]) is not None:
                self.stream.field(tag, utf8(key, param), sorted_json(value, f"{param}.{key}"))

    def drop_uuid(self, part: dict[str, Json]) -> bool:
        """Remove the client's media id, which the engine would trust blindly. Returns whether there was one."""
        if "uuid" not in part:
            return False
        del part["uuid"]
        self.changed_parts.append(part)
        return True

    def optional_field(self, tag: bytes, value: Json, param: str) -> None:
        """A short string field, unless it is null."""
        if (data := optional_utf8(value, param)) is not None:
            self.stream.field(tag, data)

    def arguments(self, value: Json, param: str) -> None:
        """A call's arguments: an object, or JSON text of one. The engine reads JSON of another type as `{}`."""
        if isinstance(value, str) and len(value) > _MAX_PARSED_CHARS:
            self.stream.text(utf8(value, param), tags.ARGUMENTS)
            return
        if isinstance(value, str) and value:
            self.steps.take(len(value) // _CHARS_PER_STEP)
            try:
                parsed = orjson.loads(value)
            except orjson.JSONDecodeError:
                self.stream.text(utf8(value, param), tags.ARGUMENTS)
                return
            value = parsed if isinstance(parsed, dict) else None
        self.stream.text(ordered_json(object_at(value or {}, param), param), tags.ARGUMENTS)

    def prompt(self, model: str) -> Prompt:
        """End the chain, and return the prompt."""
        stream = self.stream
        stream.finish()
        content = self._first_media or bytes(self._sample) or bytes.fromhex(stream.keys[-1])
        return Prompt(
            model=model,
            keys=stream.keys,
            text_bytes=stream.text_bytes,
            image_counts=stream.image_counts,
            images=stream.images,
            sample=self._seed + content,
            body_changed=bool(self.changed_parts),
            answer=self._answer_in(stream.keys),
        )

    def _answer_in(self, keys: list[str]) -> tuple[int, int]:
        """The last answer, as Prompt has it. `finish` may have dropped its keys."""
        before, end = self._answer
        if not before or before not in keys:  # most first prompts have no answer: nothing is searched
            return 0, 0
        return keys.index(before) + 1, keys.index(end) + 1

    def _take_sample(self, data: bytes) -> None:
        self._sample += data[: _SAMPLE_BYTES - len(self._sample)]
