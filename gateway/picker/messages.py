"""The messages between Envoy and an external processor, as far as a picker needs them.

The table has the names and numbers of Envoy's fields (service/ext_proc/v3, config/core/v3). Protobuf makes the classes
when this module is imported, in a pool of their own: packages with Envoy's messages bring other packages' messages
along, and a process must not know one message twice. What the table leaves out, Protobuf keeps unread.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_PACKAGE: Final = "kvgate.ext_proc"
_STRUCT: Final = "google.protobuf.Struct"
_KINDS: Final = {"bool": 8, "string": 9, "bytes": 12, "int32": 5}
"""Protobuf's numbers of its scalar types. On the wire, an enum is an int32."""
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

# Message: {field: (number, type)}. `*` before a type: it is repeated. `map:`: from strings. `|` before a field: it is
# one of a choice, which has one name in each message.
_FIELDS: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "Metadata": {"filter_metadata": (1, "map:" + _STRUCT)},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProcessingRequest": {
        "|request_headers": (2, "HttpHeaders"),
        "|response_headers": (3, "HttpHeaders"),
        "|request_body": (4, "HttpBody"),
        "|response_body": (5, "HttpBody"),
        "|request_trailers": (6, "HttpTrailers"),
        "|response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, "map:" + _STRUCT),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "|request_headers": (1, "HeadersResponse"),
        "|response_headers": (2, "HeadersResponse"),
        "|request_body": (3, "BodyResponse"),
        "|response_body": (4, "BodyResponse"),
        "|request_trailers": (5, "TrailersResponse"),
        "|response_trailers": (6, "TrailersResponse"),
        "|immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
}
OVERWRITE: Final = 2
"""Of `append_action`: the header replaces others of its name. 0 adds it to them."""
NONE, DUPLEX = 0, 4
"""Of a body mode: Envoy does not show the body, or in both directions at once (FULL_DUPLEX_STREAMED)."""


def _type_name(kind: str) -> str:
    return f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name.removeprefix("|"), number=number, label=_OPTIONAL)
    if kind.startswith("map:"):
        entry = message.nested_type.add(name="".join(part.title() for part in field.name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, kind.removeprefix("map:"))
        kind = f"*{_PACKAGE}.{message.name}.{entry.name}"
    if kind.startswith("*"):
        field.label, kind = _REPEATED, kind[1:]
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _MESSAGE, _type_name(kind)
    if name.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="of")
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kvgate/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            _add_field(message, name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    made = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _FIELDS)
    return {each.name: message_factory.GetMessageClass(each) for each in made}


_MADE: Final = _classes()
ProcessingRequest: Final = _MADE["ProcessingRequest"]
"""What Envoy says. Its field `of` is one of the parts of a request or an answer."""
ProcessingResponse: Final = _MADE["ProcessingResponse"]
"""What Envoy hears."""
