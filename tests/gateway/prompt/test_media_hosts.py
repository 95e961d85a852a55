"""The allow-list of hosts for media downloads. No URL may get around it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt import Prompt, PromptLimits, read_prompt

HOSTS = ("img.example.com", "kino.example.com", "10.0.0.7", "::1")


def read(part: dict[str, Any]) -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    limits = PromptLimits(image_hosts=HOSTS)
    return read_prompt("/v1/chat/completions", body, root_model="base", adapter=None, cache_salt=None, limits=limits)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    "url",
    [
        "https://img.example.com/a.png",
        "HTTP://IMG.example.com:8080/a.png?b#c",
        "http://img.example.com",
        "http://10.0.0.7?a",
        "http://[::1]:80/a",
    ],
)
def test_an_allowed_host_passes(url: str) -> None:
    assert read(image(url)).images == [None]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "https://evil.img.example.com/a.png",
        "https://img.example.com.evil.com/a.png",
        "https://img.example.com@evil.com/a.png",
        "https://evil.com\\@img.example.com/a.png",
        "https://evil.com#@img.example.com/",
        "https://evil.com/@img.example.com",
        "https://img.example.com:80:80/",
        "https://img.example.com\n.evil.com/",
        "https://img.example.com/a\\b",
        "https://img.example.com/a b",
        "https:///img.example.com/",
        "https:/img.example.com/",
        "http://[::1",
        "http://\u0131mg.example.com/",
        "http://\u212aino.example.com/",  # the Kelvin sign becomes a k in lower case
        "http://",
    ],
)
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_any_other_host_is_refused_and_so_is_a_url_that_parsers_may_read_differently(url: str, kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        read({"type": kind, kind: {"url": url}})
    assert refused.value.param == f"messages[0].content[0].{kind}.url"
    if url.startswith(("http://", "https://")):
        assert refused.value.code == "image_host_not_allowed"


def test_data_images_need_no_allowed_host() -> None:
    assert read(image("data:image/png;base64,AAAA")).images == [None]
