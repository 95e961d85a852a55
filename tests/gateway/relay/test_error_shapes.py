"""An error has the shape of the API that its path belongs to."""

from __future__ import annotations

import orjson
import pytest

from gateway.endpoints import endpoint_of
from gateway.errors import ApiError
from gateway.relay.error_shapes import error_body, error_event


def refused(status: int) -> ApiError:
    return ApiError(status, "a_code", "What went wrong.", "field")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_paths_have_anthropics_errors_with_our_code_and_field(path: str, status: int, kind: str) -> None:
    error = {"type": kind, "message": "What went wrong.", "code": "a_code", "param": "field"}
    wanted = {"type": "error", "error": error, "request_id": "req-1"}
    assert orjson.loads(error_body(refused(status), endpoint_of(path).api, "req-1")) == wanted


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages_of_another", "/tokenize"])
def test_all_other_paths_have_openais(path: str) -> None:
    error = {"message": "What went wrong.", "type": "invalid_request_error", "param": "field", "code": "a_code"}
    assert orjson.loads(error_body(refused(400), path, "req-1")) == {"error": error}


def test_each_api_has_an_error_event_of_its_own() -> None:
    events = {
        path: error_event(refused(502), endpoint_of(path).api, "req-1", 7)
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    }
    plain = b'{"message":"What went wrong.","type":"server_error","param":"field","code":"a_code"}'
    assert events["/v1/chat/completions"] == b'data: {"error":' + plain + b"}\n\n"
    assert events["/v1/messages"] == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"What went wrong.",'
        b'"code":"a_code","param":"field"},"request_id":"req-1"}\n\n'
    )
    assert events["/v1/responses"] == (
        b'event: error\ndata: {"type":"error","code":"a_code","message":"What went wrong.","param":"field",'
        b'"sequence_number":7,"error":' + plain + b"}\n\n"
    )
