"""Multipart forms (audio uploads): what the engine would trust is taken out, as it is from JSON.

The engine's parser must find no field that was not seen here. So a boundary counts wherever it stands, not only where
a line begins, and a part whose head could be read in more than one way is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.errors import ApiError, bad_field

_CONTENT_TYPE = re.compile(
    r"multipart/form-data\s*;\s*boundary=(\"?)([\w'()+,./:=?-]{1,70})\1\s*(?:;\s*charset=[\w-]+\s*)?", re.I | re.A
)
_HEADER = re.compile(rb"([!-9;-~]+):[ \t]*([^\r\n\x00]*)")
_DISPOSITION = re.compile(
    rb'form-data;\s*name="([^"\\%]*)"(?:;\s*filename="[^"\\]*")?(?:;\s*filename\*=[^;"\\\s]*)?\s*', re.I
)


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


def without_fields(content_type: str, body: bytes, removed: Collection[str]) -> bytes:
    """The form without the fields named in `removed`, else as it came. Raises a 400 for what is not plainly a form."""
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        raise bad_field("content-type", "must be multipart/form-data with one boundary.", "invalid_form")
    delimiter = b"--" + found[2].encode()
    before, *parts = body.split(delimiter)
    if before or not parts or parts[-1][:2] != b"--":
        raise ApiError(400, "invalid_form", "body: does not begin and end with the form's boundary.", "body")
    kept = [part for part in parts if part[:2] == b"--" or _field_of(part) not in removed]
    return body if len(kept) == len(parts) else delimiter.join([b"", *kept])


def _field_of(part: bytes) -> str:
    """The field a part belongs to; of `name[…]`, the name."""
    head, end, _ = part.partition(b"\r\n\r\n")
    blank, *lines = head.split(b"\r\n")
    headers = [_HEADER.fullmatch(line) for line in lines]
    named = [header[2] for header in headers if header and header[1].lower() == b"content-disposition"]
    disposition = _DISPOSITION.fullmatch(named[0]) if len(named) == 1 else None
    if blank or not end or not all(headers) or disposition is None:
        raise ApiError(400, "invalid_form", "body: a part of this form has a head that cannot be read.", "body")
    return disposition[1].decode("utf-8", "replace").partition("[")[0]
