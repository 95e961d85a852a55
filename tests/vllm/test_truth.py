"""The gateways' map agrees with the caches of real engines. Run by `make test-vllm`."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from bench.vllm.replicas import BLOCK_TOKENS, VllmCluster
from tests.vllm.clients import Client, Crowd, Reply, distribution
from tests.vllm.conftest import BLOCKS
from tests.vllm.workload import Ask, Messages, Workload, picture_part, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = 400
WARM_UP = 40
PROBED = 30
SHOWN = 10
AS_PREDICTED = 0.99
TOGETHER = 200
AS_PREDICTED_TOGETHER = 0.96
CAPACITY_TOKENS = 2 * BLOCKS * BLOCK_TOKENS


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def words(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def document(name: str) -> Messages:
    return [{"role": "system", "content": text(f"instructions for {name}", 700)}, user(text(name, 4000))]


def picture(name: str, question: str) -> Messages:
    return [user([words(text(name, 300)), picture_part(name), words(question)])]


def within_a_block(reply: Reply) -> bool:
    return abs(reply.cached_tokens - reply.matched_tokens) <= BLOCK_TOKENS


# -- a prefix is found through the other gateway -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["text", "image"])
async def test_a_prompt_served_by_one_gateway_is_found_by_the_other(gateways: list[Client], what: str) -> None:
    messages = document("found again") if what == "text" else picture("found again", "What is it?")
    first = await gateways[0].ask(messages)
    assert first.cached_tokens < BLOCK_TOKENS
    await gateways[1].until_found(messages, first)
    again = await gateways[1].ask(messages)
    assert (again.replica, again.state) == (first.replica, "exact")
    assert again.cached_tokens > again.prompt_tokens - 2 * BLOCK_TOKENS
    assert within_a_block(again), again
    assert again.text == first.text


async def test_a_conversation_is_found_up_to_its_last_turn(gateways: list[Client]) -> None:
    messages = document("conversation")
    for turn in range(4):
        before = await gateways[turn % 2].ask(messages)
        await gateways[1 - turn % 2].until_found(messages, before)
        messages += [{"role": "assistant", "content": before.text}, user(text(f"turn {turn}", 500))]
        explained = await gateways[1 - turn % 2].explain(messages)
        assert explained["choice"]["replica"] == before.replica
        assert abs(explained["choice"]["matched_tokens"] - before.prompt_tokens) <= BLOCK_TOKENS


async def test_an_image_is_found_under_another_question(gateways: list[Client]) -> None:
    asked = picture("two questions", "What is it?")
    first = await gateways[0].ask(asked)
    await gateways[1].until_found(asked, first)
    other = await gateways[1].ask(picture("two questions", "Another question, which has nothing in common with it"))
    assert (other.replica, other.state) == (first.replica, "exact")
    assert other.matched_tokens > 200  # an image of this size alone is 268
    assert within_a_block(other), other


# -- under cache pressure ------------------------------------------------------------------------------------------


async def test_what_is_predicted_under_cache_pressure_is_what_engines_find(gateways: list[Client]) -> None:
    """Requests use twice the tokens that the caches hold, through both gateways in turn. Then the test sends every
    prefix to both engines: prefixes that the map calls resident are cached, and prefixes that it dropped are gone.
    Requests go one after the other: evictions for other prompts must not change the result while a prompt waits. The
    next test is about those evictions."""
    workload = Workload(seed=7, documents=80, pictures=30)
    crowd = Crowd(gateways, workload)
    await crowd.run(1, lambda sent: sent < REQUESTS)
    assert crowd.failures == []
    replies = [reply for _, reply in crowd.replies[WARM_UP:]]
    assert [reply.error for reply in replies if reply.error] == []
    learned = crowd.replies[WARM_UP:]  # before that, gateways and agents learn the tokens of a byte and of an image
    _report(learned)
    computed_tokens = sum(reply.prompt_tokens - reply.cached_tokens for reply in replies)
    assert computed_tokens > 2 * CAPACITY_TOKENS, "there was no pressure"

    probes = await _probed(gateways, workload, random.Random(7))
    believed, dropped = _judged(probes, crowd.replies)
    print(distribution("probes of prefixes believed resident", believed))
    print(distribution("probes of prefixes that were dropped", dropped))

    assert sum(reply.state == "exact" for reply in replies) >= AS_PREDICTED * len(replies)
    assert sum(reply.is_as_predicted for reply in replies) >= AS_PREDICTED * len(replies)
    assert min(len(believed), len(dropped)) >= 10
    assert [reply for reply in believed if reply.lacked] == []
    assert [reply for reply in dropped if reply.exceeded] == []


async def test_little_is_evicted_from_under_prompts_that_wait_for_each_other(gateways: list[Client]) -> None:
    """The caches are full. An engine may evict blocks for one prompt that another waiting prompt was placed for. No
    placement can foresee this, and it must stay rare."""
    crowd = Crowd(gateways, Workload(seed=8, documents=80, pictures=30))
    await crowd.run(2, lambda sent: sent < TOGETHER)
    assert crowd.failures == []
    _report(crowd.replies)
    replies = [reply for _, reply in crowd.replies]
    assert [reply.error for reply in replies if reply.error] == []
    assert sum(reply.is_as_predicted for reply in replies) >= AS_PREDICTED_TOGETHER * len(replies)


def _report(served: list[tuple[Ask, Reply]]) -> None:
    replies = [reply for _, reply in served]
    prompt_tokens = sum(reply.prompt_tokens for reply in replies)
    cached_share = sum(reply.cached_tokens for reply in replies) / prompt_tokens
    print(f"\n{len(replies)} requests, {prompt_tokens} prompt tokens, {cached_share:.0%} cached")
    for kind in ("document", "picture", "conversation"):
        print(distribution(kind, (reply for ask, reply in served if ask.kind == kind)))
    print(distribution("all", replies))
    for ask, reply in [pair for pair in served if not pair[1].is_as_predicted][:SHOWN]:
        print(f"  not as predicted: {ask.subject}: {reply}")


async def _probed(gateways: list[Client], workload: Workload, rng: random.Random) -> list[tuple[Ask, Reply]]:
    """Send requests with every shared prefix, or a sample of them, to both replicas in turn, one after the other."""
    probes = []
    for number, shared in enumerate(rng.sample(workload.shared, min(PROBED, len(workload.shared)))):
        gateway = gateways[number % len(gateways)]
        for _ in range(2):  # round robin sends the second to the other replica
            ask = workload.about(shared)
            reply = await gateway.ask(ask.messages, max_tokens=1, policy="round_robin")
            probes.append((shared, reply))
    return probes


def _judged(probes: list[tuple[Ask, Reply]], served: list[tuple[Ask, Reply]]) -> tuple[list[Reply], list[Reply]]:
    """The probes of prefixes that the map calls resident, and of prefixes that were resident once and no longer are."""
    at_most: dict[tuple[str, str], int] = {}
    for ask, reply in served:
        place = ask.subject, reply.replica
        at_most[place] = max(at_most.get(place, 0), reply.prompt_tokens)
    believed = [reply for _, reply in probes if reply.matched_tokens > 0]
    dropped = [
        reply
        for ask, reply in probes
        if reply.next_boundary_tokens + BLOCK_TOKENS < at_most.get((ask.subject, reply.replica), 0)
    ]
    return believed, dropped


# -- an image's identity -------------------------------------------------------------------------------------------


async def test_an_image_under_anothers_uuid_never_gets_its_kv(
    gateways: list[Client], cluster: VllmCluster, http: httpx.AsyncClient
) -> None:
    """An engine identifies an image by the client's uuid: asked directly, it answers about the wrong image."""

    def asked(name: str, uuid: str | None) -> Messages:
        return [user([picture_part(name, uuid=uuid), words("What is it?")])]

    fooled, honest = (Client(http, replica.url) for replica in cluster.replicas)
    expected = {name: await honest.ask(asked(name, None), cache_salt="fresh") for name in ("first", "second")}
    assert expected["first"].text != expected["second"].text
    poison = await fooled.ask(asked("first", "chosen"), cache_salt="poisoned")
    taken_in = await fooled.ask(asked("second", "chosen"), cache_salt="poisoned")
    assert taken_in.text == poison.text == expected["first"].text
    assert taken_in.cached_tokens > 200

    first = await gateways[0].ask(asked("first", "chosen"))
    for number, gateway in enumerate(gateways):
        second = await gateway.ask(asked("second", "chosen"), cache_salt=f"fresh-{number}")
        assert second.text == expected["second"].text
    await gateways[1].until_found(asked("first", "chosen"), first)
    for gateway in gateways:
        second = await gateway.ask(asked("second", "chosen"), policy="round_robin")
        assert (second.matched_tokens, second.cached_tokens) == (0, 0)
        assert second.text == expected["second"].text
    assert first.text == expected["first"].text
