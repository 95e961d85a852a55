"""What is read from Envoy's messages, and what Envoy hears."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.picker import words
from gateway.picker.far_end import Endpoints
from gateway.picker.messages import DUPLEX, NONE, ProcessingRequest, ProcessingResponse
from gateway.replicas.served import endpoint_in

_BUFFERED = 2


def asked(*headers: tuple[str, str], modes: tuple[int, int] | None = (DUPLEX, DUPLEX)) -> Any:
    message = ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions?x=1"), *headers):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    return message


def test_a_request_is_read_with_the_address_that_envoy_saw() -> None:
    head = words.read_head(asked(("x-forwarded-for", "6.6.6.6, 10.1.2.3"), ("accept", "x")), trusts_headers=False)
    assert (head.method, head.path, head.query, head.peer) == ("POST", "/v1/completions", b"x=1", "10.1.2.3")
    assert dict(head.headers)[b"accept"] == b"x"
    assert not any(name.startswith(b":") for name, _ in head.headers)


@pytest.mark.parametrize(
    ("told", "peer"), [("1.2.3.4:55", "1.2.3.4"), ("[::1]:55", "::1"), ("::1", "::1"), ("unknown", ""), ("[::1", "")]
)
def test_the_address_of_a_client_is_an_ip_address_or_unknown(told: str, peer: str) -> None:
    assert words.read_head(asked(("x-forwarded-for", f"9.9.9.9, {told}")), trusts_headers=False).peer == peer


@pytest.mark.parametrize("path", ["", "*", "http://evil/v1/models"])
def test_a_target_that_is_no_path_is_refused(path: str) -> None:
    message = asked()
    message.request_headers.headers.headers[1].raw_value = path.encode()
    with pytest.raises(ApiError, match="400"):
        words.read_head(message, trusts_headers=False)


@pytest.mark.parametrize(("trusts", "found"), [(True, {"1.2.3.4:5", "[::1]:6"}), (False, None)])
def test_the_subset_of_a_header_counts_only_if_it_is_trusted(trusts: bool, found: set[str] | None) -> None:
    message = asked((words.SUBSET_HEADER, "1.2.3.4:5, [::1]:6"))
    assert words.read_head(message, trusts).subset == found


@pytest.mark.parametrize("value", ["1.2.3.4:5", ["1.2.3.4:5"], " 1.2.3.4:5 ,"])
def test_the_subset_of_metadata_always_counts_and_goes_before_a_header(value: Any) -> None:
    message = asked((words.SUBSET_HEADER, "9.9.9.9:9"))
    message.metadata_context.filter_metadata[words.SUBSET_METADATA].update({words.SUBSET_HEADER: value})
    assert words.read_head(message, trusts_headers=True).subset == {"1.2.3.4:5"}


def test_an_empty_subset_allows_nothing() -> None:
    message = asked()
    message.metadata_context.filter_metadata[words.SUBSET_METADATA].update({words.SUBSET_HEADER: ""})
    assert words.read_head(message, trusts_headers=False).subset == frozenset()


@pytest.mark.parametrize(("modes", "shows"), [((DUPLEX, DUPLEX), True), ((DUPLEX, NONE), False), (None, True)])
def test_the_modes_that_work(modes: tuple[int, int] | None, shows: bool) -> None:
    assert words.read_head(asked(modes=modes), trusts_headers=False).shows_answers is shows


@pytest.mark.parametrize("modes", [(NONE, DUPLEX), (_BUFFERED, NONE), (DUPLEX, _BUFFERED)])
def test_other_modes_are_refused(modes: tuple[int, int]) -> None:
    with pytest.raises(ApiError, match="picker_misconfigured"):
        words.read_head(asked(modes=modes), trusts_headers=False)


def test_header_and_metadata_name_one_endpoint_and_a_clients_own_headers_are_taken_away() -> None:
    came = [
        (b"authorization", b"secret"),
        (b"cookie", b"c"),
        (b"x-envoy-attempt", b"1"),
        (b"accept", b"a"),
        (b"host", b"h"),
    ]
    message = words.picked(came, "1.2.3.4:5", {"accept": "b"}, "/v1/x", 7)
    told = ProcessingResponse.FromString(message.SerializeToString())
    mutation = told.request_headers.response.header_mutation
    given = {each.header.key: each.header.raw_value for each in mutation.set_headers}
    assert given == {
        "accept": b"b",
        ":path": b"/v1/x",
        "content-length": b"7",
        words.ENDPOINT_HEADER: b"1.2.3.4:5",
    }
    assert list(mutation.remove_headers) == ["authorization", "cookie"]
    assert told.dynamic_metadata["envoy.lb"][words.ENDPOINT_HEADER] == "1.2.3.4:5"


def test_a_large_body_is_told_in_pieces_and_only_the_last_one_ends_it() -> None:
    body = bytes(range(256)) * 4096
    pieces = [
        each.request_body.response.body_mutation.streamed_response
        for each in words.bodies("request_body", body, is_last=True)
    ]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    (empty,) = words.bodies("response_body", b"", is_last=True)
    assert empty.response_body.response.body_mutation.streamed_response.end_of_stream


def test_several_headers_of_one_name_all_come() -> None:
    message = words.immediate(429, [(b"x-a", b"1"), (b"x-a", b"2")], b"full")
    actions = [each.append_action for each in message.immediate_response.headers.set_headers]
    assert actions == [2, 0], "the second one is added, and does not replace the first"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("https://10.0.0.7", "10.0.0.7:443"),
        ("http://[fd00::1]:80/base", "[fd00::1]:80"),
    ],
)
async def test_the_endpoint_of_an_address(url: str, endpoint: str) -> None:
    assert await Endpoints().of(url) == endpoint_in(url) == endpoint


async def test_a_name_is_looked_up() -> None:
    assert await Endpoints().of("http://localhost:8000") in ("127.0.0.1:8000", "[::1]:8000")
