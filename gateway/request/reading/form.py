"""Reads multipart forms (uploads of audio): finds the model, and removes the fields that engines trust.

python-multipart reads forms here by the rules of Starlette, as in vLLM. So a form that the engine takes is taken. But
readers differ about unusual spellings, and an engine must not find a field that this module missed. So the replica gets
each form written anew: the parts with their contents, and each part's name in its plainest spelling.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import ApiError, bad_field
from gateway.request.reading.model_field import Span

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_CHARSETS: Final = {b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1", b"latin1"}
"""In these, ASCII text has one spelling: a name that the engine trusts cannot hide in another one."""
MAX_PARTS: Final = 256
"""Several times the fields of a transcription, which is the largest form of any API."""
_MAX_PARAMETERS: Final = 16
"""A header with more takes long to read."""
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_A_NAME: Final = re.compile(rb'["\\%]')
"""Some readers take these for the beginning of an escape."""
_SLICE_BYTES: Final = 2**16
_MAX_MODEL_BYTES: Final = 256

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns about forms that get a 400 here


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


class Form(NamedTuple):
    """What the gateway learns from a form: its `model`, and the form for the replica."""

    model: str | None
    content_type: str
    body: bytes
    model_at: Span | None
    """Where the model is in the body."""


def read_form(content_type: str, body: bytes | bytearray, removed: Collection[str]) -> Form:
    """Reads a form without the fields in `removed`. A field `name[…]` counts as `name`.

    Raises a 400 if the body is no complete form, or has more than MAX_PARTS parts.
    """
    boundary, charset = _boundary_and_charset(content_type)
    parts = _Parts(removed)
    view = memoryview(body)
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        for start in range(0, len(body), _SLICE_BYTES):
            parser.write(bytes(view[start : start + _SLICE_BYTES]))
    except FormParserError:
        raise _unreadable("its boundary or the head of a part cannot be read.") from None
    if not parts.has_ended:
        raise _unreadable("does not begin and end with the form's boundary.")
    model = parts.model.decode("utf-8", "replace") if parts.model is not None else None
    written = blake3(body).hexdigest(length=16)  # no body can hold its own digest
    return Form(model, f"multipart/form-data; boundary={written}{charset}", *parts.written(written.encode()))


def _boundary_and_charset(content_type: str) -> tuple[bytes, str]:
    """The boundary, and the parameter for the charset if there is one."""
    _, options = parse_options_header(content_type if content_type.count(";") <= _MAX_PARAMETERS else "")
    if not options.get(b"boundary"):
        raise bad_field("content-type", "must be multipart/form-data with a boundary.", "invalid_form")
    named = options.get(b"charset")
    if named is None:
        return options[b"boundary"], ""
    if named.lower() not in _CHARSETS:
        raise bad_field("content-type", "charset: must be utf-8, us-ascii or iso-8859-1.", "invalid_form")
    return options[b"boundary"], f"; charset={named.decode()}"


class _Part(NamedTuple):
    head: bytes
    data: list[bytes]


@dataclass(slots=True)
class _Parts:
    """Collects the parts that are kept, and the value of `model`, from the parser's callbacks."""

    removed: Collection[str]
    kept: list[_Part] = field(default_factory=list)
    model: bytes | None = None
    """Of several models, the last one, as for the engine."""
    has_ended: bool = False
    _count: int = 0
    _name: bytes = b""
    _value: bytes = b""
    _head: list[tuple[bytes, bytes]] = field(default_factory=list)
    _data: list[bytes] | None = None
    """The data of a part that is kept."""
    _is_model: bool = False
    _model_data: list[bytes] | None = None

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._head_ends,
            "on_part_data": self._part_data,
            "on_end": self._ends,
        }

    def written(self, boundary: bytes) -> tuple[bytes, Span | None]:
        """The form of the parts that are kept, and where the model is in it."""
        pieces: list[bytes] = []
        size, model_at = 0, None
        for head, data in self.kept:
            written = (b"--%b\r\n%b\r\n" % (boundary, head), *data, b"\r\n")
            if data is self._model_data and self.model is not None:
                begin = size + len(written[0])
                model_at = begin, begin + len(self.model)
            size += sum(map(len, written))
            pieces += written
        return b"".join((*pieces, b"--%b--\r\n" % boundary)), model_at

    def _part_begins(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise ApiError(400, "limit_exceeded", f"body: has more than {MAX_PARTS} parts.", "body")
        self._head, self._data, self._is_model = [], None, False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if _TOKEN.fullmatch(self._name) is None or _CONTROLS.search(self._value) is not None:
            raise _unreadable("a part of this form has a head that cannot be read.")
        self._head.append((self._name, self._value))
        self._name = self._value = b""

    def _head_ends(self) -> None:
        disposition, others = b"", b""
        for header in self._head:
            if header[0].lower() == b"content-disposition":
                disposition = header[1]  # the last one, as for the engine
            else:
                others += b"%b: %b\r\n" % header
        _, options = parse_options_header(disposition if disposition.count(b";") <= _MAX_PARAMETERS else b"")
        name = options.get(b"name")
        if name is None or _NOT_IN_A_NAME.search(name) is not None:
            raise _unreadable('a part of this form has no name, or one with ", \\ or % in it.')
        field_name = name.decode("utf-8", "replace").partition("[")[0]
        if field_name in self.removed:
            return
        written = b"Content-Disposition: form-data; name=%b" % _quoted(name)
        if b"filename" in options:
            written += b"; filename=%b" % _quoted(options[b"filename"])
        self._data = []
        self.kept.append(_Part(b"%b\r\n%b" % (written, others), self._data))
        self._is_model = field_name == "model"
        if self._is_model:
            self.model, self._model_data = b"", self._data

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._data is None:
            return
        self._data.append(data[start:end])
        if self._is_model and self.model is not None:
            self.model += data[start:end]
            if len(self.model) > _MAX_MODEL_BYTES:
                raise bad_field("model", f"longer than {_MAX_MODEL_BYTES} bytes.")

    def _ends(self) -> None:
        self.has_ended = True


def _quoted(value: bytes) -> bytes:
    return b'"%b"' % value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _unreadable(what: str) -> ApiError:
    return ApiError(400, "invalid_form", f"body: {what}", "body")
