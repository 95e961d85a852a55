"""The identity of an image: its digest in the prompt stream, and the size that its header declares."""

from __future__ import annotations

import binascii
import re
from typing import Final, NamedTuple

import pybase64
from blake3 import blake3

from gateway.errors import bad_field
from gateway.prompt.fields import utf8
from gateway.prompt.image_size import read_image_size
from gateway.prompt.prompt import ImageSize, PromptLimits

_WHITESPACE: Final = b" \t\r\n\v\f"
# The characters of base64 that URLs escape. A general decoder takes microseconds for each escape, and an image may
# consist of nothing else.
_ESCAPES: Final = {"%2B": b"+", "%2F": b"/", "%3D": b"=", "%0A": b"\n", "%0D": b"\r", "%20": b" "}
_ESCAPED: Final = [(one.encode(), meant) for upper, meant in _ESCAPES.items() for one in {upper, upper.lower()}]
_MAX_HEADER_CHARS: Final = 1024

# An allow-list is safe only if the engine's URL parser finds the same host. Parsers disagree on user
# names, backslashes, whitespace and non-ASCII hosts, so a URL with any of these has no host here.
_HOST: Final = re.compile(
    r"https?://(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?(?=[/?#]|\Z)[^\x00-\x20\\]*\Z",
    re.IGNORECASE | re.ASCII,
)
_PLAIN_FILE: Final = re.compile(r"file://(?:/(?!\.{1,2}(?:/|\Z))[\w.,:@+=~ -]+)+", re.ASCII)


class ImageIdentity(NamedTuple):
    """`digest`: the 32-byte BLAKE3 of the image's bytes if `is_data`, else of its URL."""

    digest: bytes
    size: ImageSize | None
    is_data: bool


def identify_image(url: str, param: str, limits: PromptLimits) -> ImageIdentity:
    """Identify the image of a data: or http(s) URL. `param` names the field in errors."""
    if url[:5].lower() != "data:":
        return ImageIdentity(media_url_digest(url, param, limits), None, is_data=False)
    _refuse_other_than_ascii(url, param)
    header, comma, data = url[5:].partition(",")
    if not comma or len(header) > _MAX_HEADER_CHARS or "base64" not in header.lower().replace(" ", "").split(";")[1:]:
        raise bad_field(param, "must be a base64 data: URL, data:<type>;base64,<data>")
    return identify_image_data(data, param, limits)


def _refuse_other_than_ascii(text: str, param: str) -> None:
    """Checked before the text is copied: a copy of other text may take four times its size."""
    if not text.isascii():
        raise bad_field(param, "is not valid base64: it has other characters than ASCII")


def identify_image_data(data: str, param: str, limits: PromptLimits) -> ImageIdentity:
    """Identify an image given as base64."""
    _refuse_other_than_ascii(data, param)
    image = decode_base64(data, param)
    size = read_image_size(image)
    if size is not None and size.width * size.height > limits.max_image_pixels:
        allowed = f"at most {limits.max_image_pixels} are allowed (limits.max_image_pixels)"
        message = f"declares {size.width} x {size.height} pixels; {allowed}"
        raise bad_field(param, message, "image_too_large")
    return ImageIdentity(blake3(image).digest(), size, is_data=True)


def media_url_digest(url: str, param: str, limits: PromptLimits) -> bytes:
    """The 32-byte digest of a URL that the engine will fetch or read. Its host or its folder must be allowed."""
    scheme = url[:8].lower()
    if scheme.startswith("file:"):
        if not _is_in_folder(url, limits.media_folder):
            below = (
                f"below {limits.media_folder}" if limits.media_folder else "allowed: security.media_folder is not set"
            )
            raise bad_field(param, f"is a file: URL that is not {below}", "media_file_not_allowed")
    elif not scheme.startswith(("http://", "https://")):
        raise bad_field(param, "must be a data:, http: or https: URL")
    elif limits.image_hosts:
        match = _HOST.match(url)
        host = match[1].strip("[]").lower() if match else ""
        if not any(host == allowed.lower() for allowed in limits.image_hosts):
            raise bad_field(param, f"media from host {host!r} is not allowed", "image_host_not_allowed")
    return blake3(utf8(url, param)).digest()


def _is_in_folder(url: str, folder: str) -> bool:
    """Whether a URL plainly names a file below the folder: without escapes, a host, a query or `..`."""
    return bool(folder) and url.startswith(f"file://{folder.rstrip('/')}/") and _PLAIN_FILE.fullmatch(url) is not None


def decode_base64(data: str, param: str) -> bytes:
    """The bytes of base64 text, which may be percent-encoded and broken into lines."""
    try:
        # Whatever this accepts, binascii's strict mode decodes to the same bytes: in 2 ms per MB, instead of 0.04 ms.
        return pybase64.b64decode(data, validate=True)
    except ValueError:
        pass
    raw = utf8(data, param)
    for escaped, meant in _ESCAPED:
        raw = raw.replace(escaped, meant)
    try:
        return binascii.a2b_base64(raw.translate(None, _WHITESPACE), strict_mode=True)
    except ValueError as error:
        raise bad_field(param, f"is not valid base64: {error}") from None
