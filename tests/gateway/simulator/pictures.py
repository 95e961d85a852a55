"""Small images as data: URLs."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def data_url(shade: int, size: tuple[int, int] = (64, 64)) -> str:
    file = io.BytesIO()
    Image.new("L", size, shade).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image_part(shade: int, uuid: str | None = None, size: tuple[int, int] = (64, 64)) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(shade, size)}}
    return {**part, "uuid": uuid} if uuid is not None else part
