"""The allow-list of hosts for media downloads. No URL may get around it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt import Prompt, PromptLimits, read_prompt

HOSTS = ("img.example.com", "kino.example.com", "10.0.0.7", "::1")


def read(part: dict[str, Any]) -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    limits = PromptLimits(10**8, image_hosts=HOSTS)
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


def read_file(url: str, kind: str = "image_url", folder: str = "/srv/media") -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}
    limits = PromptLimits(10**8, media_folder=folder)
    return read_prompt("/v1/chat/completions", body, root_model="base", adapter=None, cache_salt=None, limits=limits)


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize("folder", ["/srv/media", "/srv/media/"])
def test_a_file_below_the_folder_passes(kind: str, folder: str) -> None:
    assert read_file("file:///srv/media/a b/0001.png", kind, folder).keys


@pytest.mark.parametrize(
    "url",
    [
        "file:///srv/other/a.png",
        "file:///srv/mediators/a.png",
        "file:///srv/media/../other/a.png",
        "file:///srv/media/a/..",
        "file:///srv/media/%2e%2e/a.png",
        "file:///srv/media/./a.png",
        "file:///srv/media//etc/a.png",
        "file:///srv/media/a\\..\\b.png",
        "file://localhost/srv/media/a.png",
        "file:/srv/media/a.png",
        "FILE:///srv/media/a.png",
        "file:///srv/media/a.png?x=/../../b",
        "file:///srv/media/a.png#x",
        "file:///srv/media/a\n.png",
    ],
)
def test_no_spelling_of_a_file_leads_out_of_the_folder(url: str) -> None:
    for kind in ("image_url", "video_url"):
        with pytest.raises(ApiError) as refused:
            read_file(url, kind)
        assert refused.value.code == "media_file_not_allowed"


def test_without_a_folder_no_file_is_allowed() -> None:
    with pytest.raises(ApiError) as refused:
        read_file("file:///srv/media/a.png", folder="")
    assert "security.media_folder" in refused.value.message
