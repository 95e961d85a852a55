"""Reads multipart forms (uploads of audio): finds the model, and removes the fields that engines trust.

python-multipart parses forms here, as in vLLM. The engine's parser must not find a field that this module missed, so
this module is stricter in two ways. It counts a boundary anywhere, not only at the start of a line. It refuses a part
whose headers can be read in more than one way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from gateway.errors import ApiError, bad_field

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_CONTENT_TYPE: Final = re.compile(
    r"multipart/form-data\s*;\s*boundary=(\"?)([\w'()+,./:=?-]{1,70})\1\s*(?:;\s*charset=[\w-]+\s*)?", re.I | re.A
)
_DISPOSITION: Final = re.compile(
    rb'form-data;[ \t]*name="([^"\\%]*)"(?:;[ \t]*filename="[^"\\]*")?(?:;[ \t]*filename\*=[^;"\\\s]*)?[ \t]*', re.I
)
_NOT_IN_A_VALUE: Final = re.compile(rb"[\n\x00]")
_SLICE_BYTES: Final = 2**16
_MAX_HEADERS: Final = 8
_MAX_HEADER_BYTES: Final = 2048
_MAX_MODEL_BYTES: Final = 256

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns about forms that get a 400 here


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


@dataclass(slots=True)
class Form:
    """What the gateway learns from a form: its `model`, and its `body` without the removed fields. `body` is None if no
    field was removed."""

    model: str | None
    body: bytes | None


def read_form(content_type: str, body: bytes | bytearray, removed: Collection[str], max_parts: int) -> Form:
    """Reads a form without the fields in `removed`. A field `name[…]` counts as `name`.

    Raises a 400 if the body is not clearly a form, or has more than `max_parts` parts.
    """
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise bad_field("content-type", "must be multipart/form-data with one boundary.", "invalid_form")
    delimiter = b"--" + found[2].encode()
    offsets = _boundary_offsets(body, delimiter, max_parts)
    parts = _Parts()
    parser = MultipartParser(
        delimiter[2:],
        parts.callbacks(),
        max_header_count=_MAX_HEADERS,
        max_header_size=_MAX_HEADER_BYTES,
    )
    view = memoryview(body)
    try:
        for start in range(0, len(body), _SLICE_BYTES):
            parser.write(bytes(view[start : start + _SLICE_BYTES]))
    except FormParserError:
        raise _unreadable("a part of this form has a head that cannot be read.") from None
    if not parts.has_ended or len(parts.fields) != len(offsets) - 1:
        raise _unreadable("does not begin and end with the form's boundary, or holds it elsewhere.")
    kept = [offset for offset, name in zip(offsets, [*parts.fields, ""], strict=True) if name not in removed]
    if len(kept) == len(offsets):
        return Form(parts.model, None)
    ends = dict(zip(offsets, [*offsets[1:], len(body)], strict=True))
    return Form(parts.model, b"".join(view[offset : ends[offset]] for offset in kept))


def _boundary_offsets(body: bytes | bytearray, delimiter: bytes, max_parts: int) -> list[int]:
    """The offsets of all boundaries in the body. The last boundary closes the form."""
    offsets = []
    offset = body.find(delimiter)
    while offset >= 0:
        offsets.append(offset)
        if len(offsets) > max_parts + 1:
            message = f"body: has more than {max_parts} parts (limits.max_form_parts)."
            raise ApiError(400, "limit_exceeded", message, "body")
        offset = body.find(delimiter, offset + len(delimiter))
    end = offsets[-1] + len(delimiter) if offsets else 0
    if not offsets or offsets[0] != 0 or body[end : end + 2] != b"--":
        raise _unreadable("does not begin and end with the form's boundary.")
    return offsets


@dataclass(slots=True)
class _Parts:
    """Collects the field name of each part, and the value of `model`, from the parser's callbacks."""

    fields: list[str] = field(default_factory=list)
    model: str | None = None
    has_ended: bool = False
    _name: bytes = b""
    _value: bytes = b""
    _disposition: bytes | None = None
    _model: bytes | None = None

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._head_ends,
            "on_part_data": self._data,
            "on_part_end": self._part_ends,
            "on_end": self._ends,
        }

    def _part_begins(self) -> None:
        self._name = self._value = b""
        self._disposition = self._model = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if _NOT_IN_A_VALUE.search(self._value):
            raise _unreadable("a part of this form has a head that cannot be read.")
        if self._name.lower() == b"content-disposition":
            if self._disposition is not None:
                raise _unreadable("a part of this form has two names.")
            self._disposition = self._value
        self._name = self._value = b""

    def _head_ends(self) -> None:
        named = _DISPOSITION.fullmatch(self._disposition or b"")
        if named is None:
            raise _unreadable("a part of this form has a head that cannot be read.")
        name = named[1].decode("utf-8", "replace").partition("[")[0]
        self.fields.append(name)
        self._model = b"" if name == "model" else None

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._model is None:
            return
        if len(self._model) + end - start > _MAX_MODEL_BYTES:
            raise bad_field("model", f"longer than {_MAX_MODEL_BYTES} bytes.")
        self._model += data[start:end]

    def _part_ends(self) -> None:
        if self._model is not None:
            self.model = self._model.decode("utf-8", "replace")

    def _ends(self) -> None:
        self.has_ended = True


def _unreadable(what: str) -> ApiError:
    return ApiError(400, "invalid_form", f"body: {what}", "body")
