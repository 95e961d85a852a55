"""What OpenTelemetry's variables change."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing.otel_variables import NO_VARIABLES, BadVariable, OtelVariables
from gateway.tracing.tracing import variables_for

SETTINGS = TracingSettings(endpoint="https://127.0.0.1:9/v1/traces")
OTLP = "OTEL_EXPORTER_OTLP"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"OTEL_SDK_DISABLED": " TRUE", "OTEL_BSP_SCHEDULE_DELAY": "x"}, {"is_disabled": True}),
        ({"OTEL_SDK_DISABLED": "1"}, {}),
        ({"OTEL_SERVICE_NAME": "", f"{OTLP}_HEADERS": "", "OTEL_BSP_SCHEDULE_DELAY": ""}, {}),
        (
            {"OTEL_SERVICE_NAME": "a", "OTEL_RESOURCE_ATTRIBUTES": "service.name=b, zone=x%2Cy,"},
            {"resource": {"service.name": "a", "zone": "x,y"}},
        ),
        ({f"{OTLP}_HEADERS": "Authorization=Basic%20eA==,x=1"}, {"headers": {"authorization": "Basic eA==", "x": "1"}}),
        ({f"{OTLP}_HEADERS": "x=1", f"{OTLP}_TRACES_HEADERS": "y=2"}, {"headers": {"y": "2"}}),
        ({f"{OTLP}_COMPRESSION": "gzip"}, {"has_gzip": True}),
        ({f"{OTLP}_COMPRESSION": "gzip", f"{OTLP}_TRACES_COMPRESSION": "none"}, {}),
        ({"OTEL_BSP_SCHEDULE_DELAY": "100"}, {"delay_s": 0.1}),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "9"}, {"most_waiting": 9, "batch": 9}),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9"}, {"batch": 9}),
    ],
)
def test_each_variable_changes_what_it_is_for(env: dict[str, str], said: dict[str, Any]) -> None:
    assert OtelVariables.of(env) == OtelVariables(**said)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "'0' is not a whole number above 0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "5s", "'5s' is not a whole number above 0"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,c", "number 2 of its parts is not NAME=VALUE"),
        (f"{OTLP}_HEADERS", "secret", "number 1 of its parts is not NAME=VALUE"),
        (f"{OTLP}_TRACES_HEADERS", "a=b,key=secret%0Ax", "number 2 of its parts is no header that can be sent"),
        (f"{OTLP}_HEADERS", "authorization: Basic secret==", "number 1 of its parts is no header that can be sent"),
        (f"{OTLP}_HEADERS", "authorization=Bearer%20", "number 1 of its parts is no header that can be sent"),
        (f"{OTLP}_HEADERS", "content-length=5", "number 1 of its parts is no header that can be sent"),
        ("OTEL_SERVICE_NAME", "caf\udce9", "not in UTF-8"),
        (f"{OTLP}_COMPRESSION", "deflate", "'deflate' is not gzip, and not none"),
        (f"{OTLP}_CERTIFICATE", "/nowhere.pem", "/nowhere.pem is no file with certificates in PEM"),
        (f"{OTLP}_CLIENT_KEY", "/nowhere.key", "'' and '/nowhere.key' are not a certificate and its key, in PEM"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_without_its_secret(variable: str, value: str, why: str) -> None:
    with pytest.raises(BadVariable) as told:
        variables_for(SETTINGS, {variable: value})
    assert variable in str(told.value).replace("[TRACES_]", "").replace("…", f"{OTLP}_CLIENT")
    assert why in str(told.value)
    assert "secret" not in str(told.value)


def test_without_an_endpoint_no_variable_stops_a_gateway() -> None:
    assert variables_for(TracingSettings(), {"OTEL_BSP_MAX_QUEUE_SIZE": "x"}) == NO_VARIABLES
