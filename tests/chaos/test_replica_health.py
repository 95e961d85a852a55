"""All gateways know what one gateway learns about a replica. A restarted replica starts with an empty cache."""

from __future__ import annotations

from bench.cluster import SimReplica
from coordinator.breaker import FAILURES
from tests.chaos.stage import Stage
from tests.cluster.clients import CHAT, ask, chat, held_stream, is_complete
from tests.polling import eventually


async def chosen(stage: Stage, text: str, url: str) -> str:
    """The replica that answers this prompt."""
    answer = await ask(stage.http, url, text)
    assert is_complete(answer), answer.text
    return str(answer.headers["x-kvgate-replica"])


async def fail_until_the_breaker_opens(stage: Stage) -> tuple[str, SimReplica]:
    """Gateway 0 meets a replica's failures. Returns a prompt that only this replica holds, and the replica."""
    text, owner = await stage.warm_prompt()
    await stage.fail(owner, "error", status=500, count=-1)

    async def is_open() -> bool:
        answer = await stage.http.post(
            stage.urls[0] + CHAT, json=chat(stage.new_prompt()), headers={"x-kvgate-policy": "round_robin"}
        )
        assert is_complete(answer), answer.text
        assert answer.headers["x-kvgate-replica"] != owner.id
        return (await stage.ledger.breakers()).get(owner.id, "0 0").split(" ")[1] != "0"

    await eventually(is_open)
    await stage.clear_faults(owner)
    return text, owner


async def test_a_replica_that_fails_few_of_many_requests_keeps_its_breaker_closed(stage: Stage) -> None:
    _, owner = await stage.warm_prompt()
    for _ in range(FAILURES + 1):
        await stage.warm_prompt(on=owner.id)
        text, _ = await stage.warm_prompt(on=owner.id)
        await stage.fail(owner, "error", status=500)
        assert await chosen(stage, text, stage.urls[0]) != owner.id
    await stage.warm_prompt(on=owner.id)
    assert (await stage.ledger.breakers())[owner.id].split(" ")[1] == "0"


async def test_a_breaker_that_one_gateway_opens_keeps_the_other_away(stage: Stage) -> None:
    text, owner = await fail_until_the_breaker_opens(stage)
    other = stage.urls[1]
    retries = await stage.metric(other, "kvgate_retries_total")
    assert await chosen(stage, text, other) != owner.id
    assert await stage.metric(other, "kvgate_retries_total") == retries, "it was not even tried"
    await eventually(lambda: stage.metric(other, "kvgate_breaker_open", replica=owner.id))


async def test_an_open_breaker_lets_a_probe_through_and_closes_when_it_succeeds(stage: Stage) -> None:
    text, owner = await fail_until_the_breaker_opens(stage)
    assert owner.id in await stage.ledger.breakers()
    texts = [text, *[(await stage.warm_prompt())[0] for _ in range(2)]]

    async def is_back() -> bool:
        return owner.id in [await chosen(stage, text, stage.urls[1]) for text in texts]

    await eventually(is_back)
    await eventually(lambda: has_no_breaker(stage))
    for url in stage.urls:
        await eventually(lambda url=url: breaker_is_closed(stage, url))


async def test_a_probe_that_fails_keeps_the_breaker_open_for_longer(stage: Stage) -> None:
    _, owner = await fail_until_the_breaker_opens(stage)
    await stage.fail(owner, "error", status=500, count=-1)

    async def was_probed() -> bool:
        assert is_complete(await ask(stage.http, stage.urls[1], stage.new_prompt()))
        failures = int((await stage.ledger.breakers())[owner.id].split(" ")[0])
        return failures > FAILURES

    await eventually(was_probed)
    await eventually(lambda: stage.metric(stage.urls[0], "kvgate_breaker_open", replica=owner.id))


async def has_no_breaker(stage: Stage) -> bool:
    return await stage.ledger.breakers() == {}


async def breaker_is_closed(stage: Stage, url: str) -> bool:
    return await stage.metric(url, "kvgate_breaker_open") == 0


async def is_known_dead(stage: Stage, replica: SimReplica) -> bool:
    return all(replica.id not in ready for ready in await stage.ready_replicas())


async def is_known_ready(stage: Stage, replica: SimReplica) -> bool:
    """A gateway knows what it has found before the store does."""
    record = (await stage.ledger.replicas())[replica.id]
    return record.state == "ready" and all(replica.id in ready for ready in await stage.ready_replicas())


async def test_a_killed_replica_is_dead_for_all_gateways_and_not_tried_again(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    owner.kill()
    await eventually(lambda: is_known_dead(stage, owner))
    assert (await stage.ledger.replicas())[owner.id].state == "dead"
    retries = await stage.metric_of_all("kvgate_retries_total")
    for url in stage.urls:
        assert await chosen(stage, text, url) != owner.id
        assert await stage.metric(url, "kvgate_replica_ready", replica=owner.id) == 0
        assert (await stage.ready(url))["status"] == 200
    assert await stage.metric_of_all("kvgate_retries_total") == retries


async def test_a_replica_that_comes_back_has_a_new_incarnation_and_owns_nothing(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    assert (await stage.explained(text))[owner.id]["matched_tokens"] > 0
    before = (await stage.ledger.replicas())[owner.id]
    owner.kill()
    await eventually(lambda: is_known_dead(stage, owner))
    owner.start()
    await eventually(lambda: is_known_ready(stage, owner))
    after = (await stage.ledger.replicas())[owner.id]
    assert after.incarnation != before.incarnation
    assert after.since_ms > before.since_ms
    for url in stage.urls:
        assert (await stage.explained(text, url))[owner.id]["matched_tokens"] == 0
    assert (await ask(stage.http, stage.urls[1], text)).headers["x-kvgate-matched-tokens"] == "0"


async def test_a_replica_that_restarts_before_anyone_notices_inherits_nothing_either(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    before = (await stage.ledger.replicas())[owner.id]
    async with held_stream(stage.http, stage.urls[0], text):
        owner.kill()
        owner.start()
        await eventually(lambda: is_another_life(stage, owner, before.incarnation))
        assert (await stage.explained(text))[owner.id]["matched_tokens"] == 0
        sums = await stage.ledger.sums()
        assert sums.active[owner.id] == 0, "what ran there died with it"
    await eventually(stage.all_load_is_given_back)


async def is_another_life(stage: Stage, replica: SimReplica, incarnation: str) -> bool:
    return (await stage.ledger.replicas())[replica.id].incarnation != incarnation


async def test_a_replica_that_says_it_is_unhealthy_is_left_alone_until_it_recovers(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    incarnation = (await stage.ledger.replicas())[owner.id].incarnation
    await stage.fail(owner, "unhealthy", count=-1)
    await eventually(lambda: is_known_dead(stage, owner))
    assert await chosen(stage, text, stage.urls[0]) != owner.id
    await stage.clear_faults(owner)
    await eventually(lambda: is_known_ready(stage, owner))
    assert (await stage.ledger.replicas())[owner.id].incarnation == incarnation
    assert (await stage.explained(text))[owner.id]["matched_tokens"] > 0, "it never lost its cache"


async def test_with_every_replica_dead_a_gateway_says_so_and_serves_again_when_one_is_back(stage: Stage) -> None:
    for replica in stage.cluster.replicas:
        replica.kill()
    await eventually(lambda: nobody_is_ready(stage))
    answer = await stage.ready(stage.urls[0])
    assert answer["status"] == 503
    assert {reason.split(":")[0] for reason in answer["reasons"]} == {"replica r0", "replica r1", "replica r2"}
    refused = await ask(stage.http, stage.urls[0], stage.new_prompt())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    assert "retry-after" in refused.headers
    stage.cluster.replicas[1].start()
    await eventually(lambda: is_known_ready(stage, stage.cluster.replicas[1]))
    assert await chosen(stage, stage.new_prompt(), stage.urls[0]) == "r1"


async def nobody_is_ready(stage: Stage) -> bool:
    return await stage.ready_replicas() == [[], []]
