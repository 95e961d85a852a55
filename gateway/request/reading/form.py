"""Multipart forms (uploads of audio): the model they name, and what the engine would trust taken out.

python-multipart parses, as it does for vLLM. The engine's parser must find no field that was not seen here, so two
things are stricter than there: a boundary counts wherever it stands, not only where a line begins, and a part whose
head could be read in more than one way is refused.
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

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of what is answered with a 400 here


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


@dataclass(slots=True)
class Form:
    """What a form says: the `model` it names, and the `body` without the removed fields; None where that is all."""

    model: str | None
    body: bytes | None


def read_form(content_type: str, body: bytes | bytearray, removed: Collection[str], max_parts: int) -> Form:
    """Read a form. Raises a 400 for what is not plainly one, and for more than `max_parts` parts.

    `removed` names fields; of `name[…]` the name counts.
    """
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise bad_field("content-type", "must be multipart/form-data with one boundary.", "invalid_form")
    delimiter = b"--" + found[2].encode()
    offsets = _offsets(body, delimiter, max_parts)
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


def _offsets(body: bytes | bytearray, delimiter: bytes, max_parts: int) -> list[int]:
    """Where the boundary stands; the last one closes the form."""
    offsets = []
    offset = body.find(delimiter)
    while offset >= 0:
        offsets.append(offset)
        if len(offsets) > max_parts + 1:
            message = f"body: has more than {max_parts} parts (limits.max_form_parts)."
            raise ApiError(400, "limit_exceeded", message, "body")
        offset = body.find(delimiter, offset + len(delimiter))
    behind = offsets[-1] + len(delimiter) if offsets else 0
    if not offsets or offsets[0] != 0 or body[behind : behind + 2] != b"--":
        raise _unreadable("does not begin and end with the form's boundary.")
    return offsets


@dataclass(slots=True)
class _Parts:
    """Takes what the parser finds: the field of each part, and the value of `model`."""

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
