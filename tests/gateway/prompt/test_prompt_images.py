"""Images: identity by content, sizes from headers, the uuids for the engine, and refusals."""

from __future__ import annotations

import base64
import warnings
import zlib
from io import BytesIO
from typing import Any
from urllib.parse import quote

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gateway.errors import ApiError
from gateway.prompt import ImageSize, Prompt, PromptLimits, read_prompt

CHAT = "/v1/chat/completions"
URL_PARAM = "messages[0].content[0].image_url.url"


def read(body: dict[str, Any], path: str = CHAT, **limits: Any) -> Prompt:
    return read_prompt(
        path,
        body,
        root_model="base",
        adapter=None,
        cache_salt=None,
        limits=PromptLimits(**{"max_image_pixels": 10**8, **limits}),
    )


def encoded(width: int = 4, height: int = 3, kind: str = "PNG", colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(url: Any, **other: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **other}


def chat(*parts: Any, **other: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **other}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def bomb_png(width: int, height: int) -> bytes:
    """A PNG whose header declares a size much larger than its few bytes."""
    data = bytearray(encoded())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = bytes(data[12:29])
    data[29:33] = zlib.crc32(header).to_bytes(4, "big")
    return bytes(data)


PNG = encoded()


@given(st.lists(st.integers(1, 60), max_size=5), st.sampled_from(["\n", "\r\n", " ", "\t", "%0A", "%0d%0a"]))
def test_an_image_is_the_same_however_its_base64_is_broken_up(cuts: list[int], space: str) -> None:
    broken = base64.b64encode(PNG).decode()
    for cut in sorted(cuts, reverse=True):
        broken = broken[:cut] + space + broken[cut:]
    url = f"data:image/png;base64,{quote(broken, safe='+/=%')}" if "%" in space else f"data:image/png;base64,{broken}"
    assert read(chat(image(url))).keys == read(chat(image(data_url(PNG)))).keys


@pytest.mark.parametrize(
    "url",
    [
        data_url(PNG, "image/jpeg"),
        data_url(PNG, "image/png;charset=utf-8;name=a"),
        data_url(PNG, ""),
        data_url(PNG).replace("data:", "DATA:").replace("base64", "BASE64"),
        data_url(PNG).replace("=", "%3D").replace("+", "%2B"),
    ],
)
def test_an_image_is_its_bytes_whatever_the_url_says_of_them(url: str) -> None:
    assert read(chat(image(url))).keys == read(chat(image(data_url(PNG)))).keys


def test_image_url_may_be_a_string_and_the_part_untyped() -> None:
    keys = read(chat(image(data_url(PNG)))).keys
    assert read(chat({"type": "image_url", "image_url": data_url(PNG)})).keys == keys
    assert read(chat({"image_url": data_url(PNG)})).keys == keys
    assert read(chat({"type": "input_image", "image_url": data_url(PNG), "detail": "low"})).keys == keys


def test_text_around_an_image_and_the_image_itself_make_the_key() -> None:
    blue = encoded(colour="blue")
    prompts = [
        read(chat(text("a"), image(data_url(PNG)))),
        read(chat(text("b"), image(data_url(PNG)))),
        read(chat(text("a"), image(data_url(blue)))),
        read(chat(image(data_url(PNG)), text("a"))),
        read(chat(text("a"), image(data_url(PNG)), image(data_url(PNG)))),
    ]
    assert len({prompt.keys[-1] for prompt in prompts}) == len(prompts)
    assert prompts[0].keys[0] == prompts[4].keys[0]


def test_every_image_ends_a_key_wherever_it_stands() -> None:
    pictures = [image(data_url(encoded(width))) for width in (1, 2, 3)]
    body = chat(text("a"), *pictures)
    body["messages"].append({"role": "tool", "content": [pictures[0]]})
    prompt = read(body)
    assert prompt.images == [(1, 3), (2, 3), (3, 3), (1, 3)]
    assert prompt.image_counts == [1, 2, 3, 3, 4, 4]


def test_a_data_image_is_pinned_by_the_digest_of_its_bytes() -> None:
    body = chat(image(data_url(PNG), uuid="somebody else's"))
    assert read(body).body_changed
    assert body["messages"][0]["content"][0] == image(data_url(PNG), uuid=blake3.blake3(PNG).hexdigest())


def test_an_image_decoded_by_the_clients_own_rules_is_not_pinned() -> None:
    body = chat(image(data_url(PNG)), media_io_kwargs={"image": {"image_mode": "L"}})
    assert not read(body).body_changed
    assert "uuid" not in body["messages"][0]["content"][0]


@pytest.mark.parametrize(
    "part",
    [
        image("https://example.com/a.png"),
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "file", "file": {"file_data": "AAAA"}},
        {"type": "something_new", "data": "AAAA"},
    ],
)
@pytest.mark.parametrize("uuid", ["mine", None, 5])
def test_a_clients_uuid_is_dropped_from_every_part(part: dict[str, Any], uuid: Any) -> None:
    body = chat({**part, "uuid": uuid})
    prompt = read(body)
    assert prompt.body_changed
    assert body["messages"][0]["content"] == [part]
    unmarked = read(chat(part))
    assert prompt.keys == unmarked.keys
    assert not unmarked.body_changed


def test_media_are_told_apart_by_kind_and_content() -> None:
    parts = [
        {"type": "input_audio", "input_audio": "AAAA"},
        {"type": "input_audio", "input_audio": "AAAB"},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "video_url", "video_url": "http://x/AAAA"},
        {"type": "audio_url", "audio_url": "http://x/AAAA"},
        {"type": "image_url", "image_url": "http://x/AAAA"},
        {"type": "image_url", "image_url": data_url(b"http://x/AAAA")},
    ]
    prompts = [read(chat(part)) for part in parts]
    assert len({prompt.keys[-1] for prompt in prompts}) == len(parts)
    assert all(prompt.images == [None] for prompt in prompts)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_is_read_from_the_header(kind: str) -> None:
    assert read(chat(image(data_url(encoded(40, 24, kind))))).images == [ImageSize(40, 24)]


@pytest.mark.parametrize(
    "data", [b"", b"P", b"not an image", PNG[:20], b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF0000WEBPVP8 "]
)
def test_an_image_that_cannot_be_identified_is_left_to_the_engine(data: bytes) -> None:
    assert read(chat(image(data_url(data)))).images == [None]


@pytest.mark.parametrize("pixels", [(20_000, 20_000), (10_000, 10_001), (2**31 - 1, 2**31 - 1)])
def test_an_image_that_declares_too_many_pixels_is_refused_without_a_warning(pixels: tuple[int, int]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(ApiError) as refused:
            read(chat(image(data_url(bomb_png(*pixels)))))
    assert (refused.value.code, refused.value.param) == ("image_too_large", URL_PARAM)
    assert not seen


def test_the_pixel_limit_is_the_callers_and_not_pillows() -> None:
    prompt = read(chat(image(data_url(bomb_png(30_000, 30_000)))), max_image_pixels=900_000_000)
    assert prompt.images == [(30_000, 30_000)]


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,@@@@",
        "data:image/png;base64,QQ",
        "data:image/png;base64,QQ==QQ==",
        "data:image/png;base64,=QQ=",
        "data:image/png;base64,é",
        "data:image/png;base64,%zz",
        "data:image/png;base64,\ud800",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:",
        "",
        "file:///etc/passwd",
        "ftp://example.com/a.png",
        " https://example.com/a.png",
        "//example.com/a.png",
        "https://example.com/\ud800",
    ],
)
def test_a_broken_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(chat(image(url)))
    assert (refused.value.status, refused.value.param) == (400, URL_PARAM)


@pytest.mark.parametrize(
    ("param", "part"),
    [
        ("image_url", {"type": "image_url"}),
        ("image_url", {"type": "image_url", "image_url": None, "uuid": "x"}),
        ("image_url", {"type": "image_url", "image_url": 5}),
        ("image_url.url", {"type": "image_url", "image_url": {}}),
        ("image_url.url", {"type": "image_url", "image_url": {"url": None}, "uuid": "x"}),
        ("image_url.url", {"type": "image_url", "image_url": {"url": 5}}),
        ("video_url.url", {"type": "video_url", "video_url": {"url": "file:///a"}}),
        ("audio_url", {"type": "audio_url", "audio_url": "ftp://a"}),
        ("input_audio", {"type": "input_audio", "uuid": "x"}),
        ("type", {"uuid": "x"}),
    ],
)
def test_a_medium_without_data_is_refused_by_name(param: str, part: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(chat(text("a"), part))
    assert refused.value.param == f"messages[0].content[1].{param}"


def test_a_uuid_alone_is_answered_with_what_to_do() -> None:
    with pytest.raises(ApiError, match="send the data"):
        read(chat({"type": "image_url", "image_url": None, "uuid": "x"}))


def test_affinity_is_that_of_the_shallowest_image_whatever_is_asked_about_it() -> None:
    first = read(chat(text("what is this?"), image(data_url(PNG))))
    second = read(chat(text("and in French?"), image(data_url(PNG)), image(data_url(encoded(9, 9)))))
    other = read(chat(text("what is this?"), image(data_url(encoded(9, 9)))))
    assert first.affinity == second.affinity != other.affinity
