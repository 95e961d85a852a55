"""What Envoy's messages say, and what is said to Envoy. Pure.

A request always leaves with the header `x-gateway-destination-endpoint` that the picker sets: one that a client sends
would let it choose any address that Envoy can reach.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from google.protobuf import struct_pb2

from gateway.errors import ApiError
from gateway.http.exchange import RawHeaders
from gateway.picker.messages import DUPLEX, NONE, OVERWRITE, ProcessingResponse

ENDPOINT_HEADER: Final = "x-gateway-destination-endpoint"
SUBSET_HEADER: Final = "x-gateway-destination-endpoint-subset"
_SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
_LB_METADATA: Final = "envoy.lb"
_PIECE_BYTES: Final = 2**18
"""The most of a body in one message. gRPC refuses messages of more than 4 MB."""
_ENVOYS_OWN: Final = (":", "x-envoy-", "x-forwarded-")
"""Headers that begin so are Envoy's: it sets them itself, and obeys no other."""
_OF_FRAMING: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "te"})
_UPSTREAM_TIME: Final = b"x-envoy-upstream-service-time"
_UNREACHABLE: Final = frozenset({502, 503, 504})


class RequestHead(NamedTuple):
    """What the first message of a call says."""

    method: str
    path: str
    """Percent-decoded once."""
    query: bytes
    headers: list[tuple[bytes, bytes]]
    """Without those that begin with a colon."""
    peer: str
    """The client's address, as Envoy knows it; empty if it does not say."""
    scheme: str
    has_body: bool
    subset: frozenset[str] | None
    """The `ip:port` that the request may go to; None if any."""
    shows_answers: bool
    """Whether Envoy sends the bodies of answers through the picker, so that they can be changed."""


def read_head(message: Any, trusts_headers: bool) -> RequestHead:
    """Reads a ProcessingRequest with request headers. Raises ApiError if it names no path."""
    told = list(_headers(message.request_headers))
    pseudo = {name: value.decode("latin-1") for name, value in told if name.startswith(b":")}
    shows_answers = _checked_modes(message)
    headers = [(name, value) for name, value in told if not name.startswith(b":")]
    path, _, query = pseudo.get(b":path", "").partition("?")
    if not path.startswith("/"):
        raise ApiError(400, "invalid_http", "This request has no path.")
    named = dict(headers)
    came_through = named.get(b"x-forwarded-for", b"").decode("latin-1")
    return RequestHead(
        pseudo.get(b":method", "GET"),
        unquote(path) if "%" in path else path,
        query.encode("latin-1"),
        headers,
        _address(came_through.rpartition(",")[2].strip()),  # Envoy adds the one that it sees to the end
        pseudo.get(b":scheme", "http"),
        not message.request_headers.end_of_stream,
        _subset(message, named if trusts_headers else {}),
        shows_answers,
    )


def _address(text: str) -> str:
    """The IP address in a text that may have a port, too; empty if it has none."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(text))
    with suppress(ValueError):
        return str(ipaddress.ip_address(urlsplit(f"//{text}").hostname or ""))
    return ""


def _checked_modes(message: Any) -> bool:
    """Whether Envoy shows the bodies of answers. Raises ApiError for modes in which a picker cannot work. Envoy before
    1.34 does not tell them."""
    if not message.HasField("protocol_config"):
        return True
    told = message.protocol_config
    if told.request_body_mode == DUPLEX and told.response_body_mode in (DUPLEX, NONE):
        return bool(told.response_body_mode == DUPLEX)
    why = (
        "The proxy's ext_proc filter needs request_body_mode: FULL_DUPLEX_STREAMED, and response_body_mode: "
        "FULL_DUPLEX_STREAMED or NONE."
    )
    raise ApiError(500, "picker_misconfigured", why)


def read_answer_head(told: Any) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The status and the headers of an answer, names in lower case."""
    headers = list(_headers(told))
    status = next((int(value) for name, value in headers if name == b":status"), 200)
    return status, [(name, value) for name, value in headers if not name.startswith(b":")]


def is_envoys_own(status: int, headers: RawHeaders) -> bool:
    """Whether Envoy gives this answer itself, because it does not reach the replica. It notes the time of all
    others."""
    return status in _UNREACHABLE and all(name != _UPSTREAM_TIME for name, _ in headers)


def _headers(told: Any) -> Iterator[tuple[bytes, bytes]]:
    for header in told.headers.headers:
        yield header.key.lower().encode("latin-1", "replace"), header.raw_value or header.value.encode()


def _subset(message: Any, headers: Mapping[bytes, bytes]) -> frozenset[str] | None:
    """The metadata comes before the header: only Envoy itself can write it."""
    hint = message.metadata_context.filter_metadata
    if SUBSET_METADATA in hint and SUBSET_HEADER in hint[SUBSET_METADATA].fields:
        value = hint[SUBSET_METADATA].fields[SUBSET_HEADER]
        texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    elif SUBSET_HEADER.encode() in headers:
        texts = [headers[SUBSET_HEADER.encode()].decode("latin-1")]
    else:
        return None
    return frozenset(each.strip() for text in texts for each in text.split(",") if each.strip())


def metadata_value(message: Any, path: Sequence[str]) -> str:
    """The text at this path in the metadata that Envoy's filters wrote: a namespace, then keys. Empty if none is."""
    hint = message.metadata_context.filter_metadata
    if path[0] not in hint:
        return ""
    value = struct_pb2.Value(struct_value=hint[path[0]])
    for key in path[1:]:
        if key not in value.struct_value.fields:
            return ""
        value = value.struct_value.fields[key]
    return str(value.string_value)


def attribute_value(message: Any, name: str) -> str:
    """The text of an attribute that Envoy's filter sends (`request_attributes`); empty if there is none."""
    found = (each.fields[name].string_value for each in message.attributes.values() if name in each.fields)
    return str(next(found, ""))


# -- what Envoy hears ------------------------------------------------------------------------------------------------


def _set(mutation: Any, headers: Iterable[tuple[bytes, bytes]]) -> set[str]:
    """Sets these headers; the second one of a name is added to the first. Returns the names."""
    names = set[str]()
    for raw, value in headers:
        name = raw.decode("latin-1")
        option = mutation.set_headers.add(append_action=0 if name in names else OVERWRITE)
        option.header.key, option.header.raw_value = name, value
        names.add(name)
    return names


def _remove_others(mutation: Any, came: RawHeaders, kept: set[str]) -> None:
    """Removes the headers that came, but for those `kept` and Envoy's own."""
    names = {name.decode("latin-1") for name, _ in came} - kept - _OF_FRAMING
    mutation.remove_headers.extend(sorted(name for name in names if not name.startswith(_ENVOYS_OWN)))


def served(message: Any) -> str:
    """The `ip:port` that has answered, as far as the proxy tells; empty if it does not."""
    return metadata_value(message, (_LB_METADATA, _SERVED))


def picked(came: RawHeaders, endpoint: str, headers: Mapping[str, str], target: str, body_bytes: int) -> Any:
    """The request goes to this endpoint, with these headers and no others of the client's. If `endpoint` has several,
    with commas, the proxy may try them in turn."""
    message = ProcessingResponse()
    mutation = message.request_headers.response.header_mutation
    told = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    told += [(b":path", target.encode("latin-1")), (ENDPOINT_HEADER.encode(), endpoint.encode())]
    if body_bytes:
        told.append((b"content-length", str(body_bytes).encode()))
    _remove_others(mutation, came, _set(mutation, told))
    message.dynamic_metadata.update({_LB_METADATA: {ENDPOINT_HEADER: endpoint}})
    return message


def passed_on(endpoint: str) -> Any:
    """The request goes to this endpoint as it came."""
    message = ProcessingResponse()
    _set(message.request_headers.response.header_mutation, [(ENDPOINT_HEADER.encode(), endpoint.encode())])
    message.dynamic_metadata.update({_LB_METADATA: {ENDPOINT_HEADER: endpoint}})
    return message


def bodies(side: str, body: bytes | bytearray | memoryview, *, is_last: bool) -> Iterator[Any]:
    """The messages with a piece of a body. `side`: request_body or response_body. Without bytes, one that ends it."""
    for at in range(0, len(body) or 1, _PIECE_BYTES):
        message = ProcessingResponse()
        streamed = getattr(message, side).response.body_mutation.streamed_response
        streamed.body = bytes(body[at : at + _PIECE_BYTES])
        streamed.end_of_stream = is_last and at + _PIECE_BYTES >= len(body)
        yield message


def answer_begins(came: RawHeaders, status: int, headers: RawHeaders, length_bytes: int | None) -> Any:
    """The answer has this status and these headers, and not those that came from the replica."""
    message = ProcessingResponse()
    mutation = message.response_headers.response.header_mutation
    told = [(b":status", str(status).encode()), *headers]
    if length_bytes is None:
        mutation.remove_headers.append("content-length")
    else:
        told.append((b"content-length", str(length_bytes).encode()))
    _remove_others(mutation, came, _set(mutation, told))
    return message


def passes(came: RawHeaders, headers: RawHeaders) -> Any:
    """The replica's answer passes, with these headers and not those that came. Its body, and so its length, stays."""
    message = ProcessingResponse()
    mutation = message.response_headers.response.header_mutation
    _remove_others(mutation, came, _set(mutation, headers))
    return message


def immediate(status: int, headers: RawHeaders, body: bytes | bytearray) -> Any:
    """Envoy answers this itself."""
    message = ProcessingResponse()
    response = message.immediate_response
    response.status.code, response.body = status, bytes(body)
    response.details = "kvgate"
    _set(response.headers, headers)
    return message


def refusal(error: ApiError) -> Any:
    """Envoy answers this error."""
    headers = {"content-type": "application/json", **error.headers}
    return immediate(error.status, [(name.encode(), value.encode()) for name, value in headers.items()], error.body())


def unchanged(kind: str) -> Any:
    """Headers or trailers stay as they are. `kind`: the field of the message that is answered."""
    message = ProcessingResponse()
    getattr(message, kind).SetInParent()
    return message
