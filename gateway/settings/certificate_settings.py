"""Where a certificate is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.settings.base import Section

PemFile = Annotated[str, Field(min_length=1)]


class CertificateSettings(Section):
    certificate: PemFile
    key: PemFile
