"""What OpenTelemetry's variables change."""

from __future__ import annotations

import pytest

from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing.tracing import heed_environment

QUEUE, BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
SETTINGS = TracingSettings(endpoint="http://127.0.0.1:9/v1/traces")


@pytest.mark.parametrize(("value", "is_disabled"), [("true", True), (" TRUE", True), ("false", False), ("", False)])
def test_the_environment_can_disable_all_traces(value: str, is_disabled: bool) -> None:
    assert (heed_environment(SETTINGS, {"OTEL_SDK_DISABLED": value}).endpoint is None) == is_disabled


@pytest.mark.parametrize(
    ("given", "told"), [({}, {QUEUE: "512", BATCH: "128"}), ({QUEUE: "9"}, {QUEUE: "9"}), ({BATCH: "9"}, {BATCH: "9"})]
)
def test_who_sets_the_size_of_the_queue_or_of_batches_gets_the_sdks_own_for_the_other(
    given: dict[str, str], told: dict[str, str]
) -> None:
    env = dict(given)
    heed_environment(SETTINGS, env)
    assert env == told
