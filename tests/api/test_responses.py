"""Stored responses: every gateway finds the replica that made a response, or says clearly that none did."""

from __future__ import annotations

import openai
import pytest

from tests.api.stage import Stage, bearer, error_of, sdk, text
from tests.polling import wait_until


def test_a_response_is_created_and_found_again_by_the_other_gateway(
    client: openai.OpenAI, other_client: openai.OpenAI
) -> None:
    made = client.responses.create(model="sim", input=text(500), max_output_tokens=5)
    assert made.output_text
    assert other_client.responses.retrieve(made.id).output_text == made.output_text


async def test_a_streamed_response_is_found_again_as_well(
    async_client: openai.AsyncOpenAI, other_client: openai.OpenAI
) -> None:
    stream = await async_client.responses.create(model="sim", input=text(500), max_output_tokens=5, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete", "as in vLLM, it has come upon its limit"
    found = other_client.responses.retrieve(events[-1].response.id)
    assert found.output_text == events[-1].response.output_text


def test_a_conversation_goes_on_by_previous_response_id_on_the_replica_that_keeps_it(
    client: openai.OpenAI, other_client: openai.OpenAI, stage: Stage
) -> None:
    for _ in range(3):
        first = client.responses.with_raw_response.create(model="sim", input=text(2000), max_output_tokens=5)
        second = other_client.responses.with_raw_response.create(
            model="sim", input="And then?", previous_response_id=first.parse().id, max_output_tokens=5
        )
        assert second.headers["x-kvgate-replica"] == first.headers["x-kvgate-replica"]
        assert second.headers["x-kvgate-decision"].startswith("pinned")
        usage = second.parse().usage
        assert usage is not None
        assert usage.input_tokens_details.cached_tokens > 400


def test_the_events_of_a_response_that_has_none_are_refused(mixed: Stage) -> None:
    """vLLM begins such a stream, and breaks it off without an event."""
    with sdk(mixed.gateways[0]) as client:
        made = client.responses.create(model="a", input=text(100), background=True, max_output_tokens=4)
        for _ in range(3):
            with pytest.raises(openai.BadRequestError, match="no events came for this response") as refused:
                list(client.responses.retrieve(made.id, stream=True))
            assert (refused.value.code, refused.value.param) == ("no_events", "stream")
        assert client.responses.retrieve(made.id).id == made.id


def test_a_background_response_is_cancelled(mixed: Stage) -> None:
    with sdk(mixed.gateways[0]) as client:
        made = client.responses.create(model="slow", input=text(100), background=True, max_output_tokens=100_000)
        assert made.status == "queued"
        assert client.responses.retrieve(made.id).status in ("queued", "in_progress")
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
    assert wait_until(lambda: mixed.state_of(mixed.sims[3])["running"] == 0)


def test_what_a_replica_says_of_a_cancellation_passes_through_the_other_gateway(stage: Stage) -> None:
    made = stage.post("/v1/responses", {"model": "sim", "input": text(100), "max_output_tokens": 2}).json()
    answer = stage.post(f"/v1/responses/{made['id']}/cancel", gateway=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Cannot cancel a synchronous response."


@pytest.mark.parametrize("path", ["/v1/responses/resp_unknown", "/v1/responses/resp_unknown/input_items"])
def test_an_unknown_response_is_a_404(stage: Stage, path: str) -> None:
    seen = stage.requests_seen()
    answer = stage.get(path)
    assert answer.status_code == 404
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("response_not_found", "response_id")
    assert stage.requests_seen() == seen


def test_an_unknown_previous_response_is_a_404_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="sim", input="x", previous_response_id="resp_unknown")
    assert (refused.value.code, refused.value.param) == ("response_not_found", "previous_response_id")


def test_a_response_that_was_not_stored_is_the_replicas_404(stage: Stage) -> None:
    made = stage.post("/v1/responses", {"model": "sim", "input": "x", "store": False}).json()
    answer = stage.get(f"/v1/responses/{made['id']}", gateway=1)
    assert answer.status_code == 404
    assert "not found" in answer.json()["error"]["message"]


def test_of_several_models_a_responses_own_is_found_without_naming_it(mixed: Stage) -> None:
    for model in ("a", "b", "a", "a", "a-french"):
        made = mixed.post("/v1/responses", {"model": model, "input": text(600), "max_output_tokens": 3}).json()
        found = mixed.get(f"/v1/responses/{made['id']}")
        assert found.status_code == 200, found.text
        assert found.json()["id"] == made["id"]


def test_a_response_is_its_tenants_alone(guarded: Stage) -> None:
    body = {"model": "sim", "input": text(200), "max_output_tokens": 3}
    made = guarded.post("/v1/responses", body, headers=bearer("alice")).json()
    path = f"/v1/responses/{made['id']}"
    assert guarded.get(path, gateway=1, headers=bearer("anna")).status_code == 200
    seen = guarded.requests_seen()
    for suffix in ("", "/cancel", "/input_items", "/anything", "/"):
        answer = guarded.get(path + suffix, headers=bearer("bob"))
        assert answer.status_code == 404, suffix
        assert error_of(answer)["code"] in ("response_not_found", "path_not_allowed")
    goes_on = {**body, "previous_response_id": made["id"]}
    assert guarded.post("/v1/responses", goes_on, headers=bearer("bob")).status_code == 404
    assert guarded.requests_seen() == seen
    assert guarded.post("/v1/responses", goes_on, headers=bearer("alice"), gateway=1).status_code == 200


def test_an_id_of_any_length_is_not_looked_up(stage: Stage) -> None:
    body = {"model": "sim", "input": "hi", "previous_response_id": "r" * 300}
    refused = stage.post("/v1/responses", body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "previous_response_id")
