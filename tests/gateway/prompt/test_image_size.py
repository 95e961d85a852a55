"""Image sizes from image headers, checked against images that Pillow writes. A hostile image is read only in small
part."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gateway.prompt.image_size import read_image_size
from gateway.prompt.prompt import ImageSize

sides = st.integers(1, 700)
APP0 = b"\xff\xe0\x00\x02"
"""An empty JPEG segment."""


def encoded(size: tuple[int, int], kind: str, **options: object) -> bytes:
    file = BytesIO()
    Image.new("RGB", size).save(file, kind, **options)
    return file.getvalue()


class Watched(bytes):
    """Bytes that count how often they are read."""

    looks = 0

    def __getitem__(self, place: object) -> object:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(place)  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("GIF", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"icc_profile": b"p" * 200_000, "comment": b"c" * 60_000}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"icc_profile": b"p" * 1000}),
    ],
)
@given(width=sides, height=sides)
def test_the_size_is_the_one_that_was_written(kind: str, options: dict[str, object], width: int, height: int) -> None:
    assert read_image_size(encoded((width, height), kind, **options)) == ImageSize(width, height)


@given(st.binary(max_size=64), st.sampled_from([b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF0000WEBP", b"\xff\xd8", b"BM"]))
def test_a_broken_header_has_no_size_or_one_of_pixels(data: bytes, magic: bytes) -> None:
    size = read_image_size(magic + data)
    assert size is None or (size.width > 0 and size.height > 0)


def test_a_jpeg_of_nothing_but_markers_is_given_up_after_a_bounded_number() -> None:
    photo = encoded((40, 24), "JPEG")
    assert read_image_size(photo[:2] + APP0 * 500 + photo[2:]) == ImageSize(40, 24)
    hostile = Watched(photo[:2] + APP0 * 5_000_000 + photo[2:])
    assert read_image_size(hostile) is None
    assert hostile.looks < 5000


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM"])
def test_the_size_of_another_format_is_unknown(kind: str) -> None:
    assert read_image_size(encoded((40, 24), kind)) is None
