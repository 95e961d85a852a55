"""Images in prompts: the map predicts which images are equal, and the engine's cache confirms it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.stage import Stage, text
from tests.gateway.simulator.pictures import data_url

SIDE = (640, 640)
IMAGE_TOKENS = 2400  # about, in the simulator: 640 x 640 / 161


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def words(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def marked(before: str, url: str, after: str) -> list[dict[str, Any]]:
    return [words(before), image(url), words(after)]


def test_the_same_text_and_image_are_found_by_the_other_gateway(stage: Stage) -> None:
    before = text(400)
    first = stage.chat(marked(before, data_url(40, SIDE), "What is it?"))
    again = stage.chat(marked(before, data_url(40, SIDE), "And what colour?"), gateway=1)
    assert again.replica == first.replica, (first, again)
    assert again.decision.startswith("hit")
    assert again.matched_tokens > IMAGE_TOKENS * 0.5
    assert again.cached_tokens > IMAGE_TOKENS


def test_the_same_image_after_another_text_differs(stage: Stage) -> None:
    url = data_url(41, SIDE)
    stage.chat(marked(text(400), url, "What is it?"))
    other = stage.chat(marked(text(400), url, "What is it?"))
    assert other.matched_tokens == 0
    assert other.cached_tokens < 16


@pytest.mark.parametrize("again", ["line breaks", "parameters", "capitals"])
def test_the_same_image_in_another_data_url_is_the_same(stage: Stage, again: str) -> None:
    before = text(400)
    url = data_url(44, SIDE)
    encoded = url.partition(",")[2]
    lines = "\r\n".join(encoded[start : start + 76] for start in range(0, len(encoded), 76))
    variants = {
        "line breaks": f"data:image/png;base64,{lines}\n",
        "parameters": f"data:image/png;name=a.png;charset=utf-8;base64,{encoded}",
        "capitals": f"data:IMAGE/PNG;base64,{encoded}",
    }
    first = stage.chat(marked(before, url, "What is it?"))
    same = stage.chat(marked(before, variants[again], "What is it?"), gateway=1)
    assert same.replica == first.replica
    assert same.matched_tokens > IMAGE_TOKENS * 0.5
    assert same.cached_tokens > IMAGE_TOKENS


def test_images_of_one_conversation_stay_together_with_messages_of_anthropics_form(stage: Stage) -> None:
    encoded = data_url(47, SIDE).partition(",")[2]
    before = text(400)
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    content = [words(before), {"type": "image", "source": source}]
    body = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": content}]}
    first = stage.post("/v1/messages", body)
    again = stage.chat([words(before), image(f"data:image/png;base64,{encoded}"), words("More?")], gateway=1)
    assert again.replica == first.headers["x-kvgate-replica"]
    assert again.matched_tokens > IMAGE_TOKENS * 0.5
