"""What `kvgate picker` needs beside a gateway's settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.settings.base import Port, Section
from gateway.settings.certificate_settings import CertificateSettings, PemFile

_Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=8)]
_Header = Annotated[str, Field(pattern=r"^[a-z0-9!#$%&'*+.^_|~-]+$")]


class PickerTlsSettings(CertificateSettings):
    client_ca: PemFile | None = None


class PickerTenantSettings(Section):
    """Where the proxy says which tenant it has authenticated."""

    metadata: _Words | None = None
    attribute: Annotated[str, Field(min_length=1)] | None = None
    header: _Header | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(each is not None for each in (self.metadata, self.attribute, self.header)) != 1:
            raise ValueError("give one of metadata, attribute and header")
        return self


def _off(told: object) -> object:
    """YAML reads `off` as false."""
    return "off" if told is False else told


class PickerSettings(Section):
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    port: Port = 9002
    tls: Annotated[PickerTlsSettings | Literal["self-signed", "off"], BeforeValidator(_off)] = "self-signed"
    fallback_endpoints: Annotated[int, Field(ge=0, le=7)] = 0
    trusts_subset_header: bool = False
    tenant: PickerTenantSettings | None = None
