from __future__ import annotations

from tests.gateway.simulator.conftest import RunningReplica, StartReplica


async def test_a_stream_tells_the_official_sequence_of_events(replica: RunningReplica) -> None:
    plain = await replica.openai.responses.create(model="sim", input="hello", max_output_tokens=3)
    stream = await replica.openai.responses.create(model="sim", input="hello", max_output_tokens=3, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (plain.output_text)
    last = events[-1]
    assert last.type == "response.incomplete", "it has come upon its limit"
    assert last.response.output_text == plain.output_text
    assert (last.response.status, last.response.output[0].status) == ("incomplete", "incomplete")
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 3


async def test_cancelling_a_background_response_takes_it_out_of_the_engine(
    start_replica: StartReplica,
) -> None:
    replica = await start_replica(speed=0.001)
    response = await replica.openai.responses.create(model="sim", input="x", background=True)
    await replica.until(lambda state: state["running"] == 1)
    assert (await replica.openai.responses.cancel(response.id)).status == "cancelled"
    state = await replica.state()
    assert (state["running"], state["blocks_used"], state["aborted"]) == (0, 0, 1)
    assert (await replica.openai.responses.retrieve(response.id)).status == "cancelled"
