"""Where a picker listens for calls, and with which certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.ops.local.ports import free_ports
from gateway.picker.service import Service
from gateway.settings.picker_settings import PickerSettings
from gateway.tls import BadCertificate


async def unasked(_context: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_it_listens_on_addresses_of_both_kinds(host: str) -> None:
    service = Service(PickerSettings(host=host, port=free_ports(1)[0]), unasked)
    await service.start()
    await service.stop(0)


async def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    tls = {"certificate": str(tmp_path / "x.pem"), "key": str(tmp_path / "x.pem")}
    service = Service(PickerSettings.model_validate({"port": free_ports(1)[0], "tls": tls}), unasked)
    with pytest.raises(BadCertificate, match=r"picker\.tls: "):
        await service.start()
