from __future__ import annotations

from typing import Any

import pytest

from gateway.simulator.images import image_tokens
from tests.gateway.simulator.conftest import RunningReplica
from tests.gateway.simulator.pictures import data_url, image_part

_QUESTION = {"type": "text", "text": "what is this?"}


def test_an_image_costs_tokens_by_its_size() -> None:
    assert image_tokens(1024, 1024) == 6513
    assert image_tokens(8, 8) == 64


async def test_the_same_image_is_a_hit_and_another_is_not(replica: RunningReplica) -> None:
    assert await replica.cached_tokens([image_part(1), _QUESTION]) == 0
    assert await replica.cached_tokens([image_part(1), _QUESTION]) > 0
    assert await replica.cached_tokens([image_part(2), _QUESTION]) == 0


async def test_a_uuid_is_trusted_blindly_whatever_image_it_names(replica: RunningReplica) -> None:
    assert await replica.cached_tokens([image_part(1, "u-1"), _QUESTION]) == 0
    assert await replica.cached_tokens([image_part(2, "u-1"), _QUESTION]) > 0
    assert await replica.cached_tokens([image_part(1, "u-2"), _QUESTION]) == 0
    assert [request["image_ids"] for request in (await replica.state())["recent"]] == [
        ["u-1"],
        ["u-1"],
        ["u-2"],
    ]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://x",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,A",
        "data:,x",
        "data:",
        "",
        data_url(1)[:60],
    ],
)
async def test_an_unreadable_image_is_a_bad_request(replica: RunningReplica, url: str) -> None:
    status, answer = await _post(replica, {"type": "image_url", "image_url": {"url": url}})
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


async def _post(replica: RunningReplica, part: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "sim", "messages": [{"role": "user", "content": [part, _QUESTION]}]}
    return await replica.post("/v1/chat/completions", body)
