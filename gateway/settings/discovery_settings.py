"""The sources of replicas that are not listed: DNS names and Kubernetes; `configs/gateway.yaml` shows every field."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gateway.settings.base import HostName, Labels, Port, Section

Scheme = Literal["http", "https"]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class DnsSettings(Section):
    names: list[HostName]
    port: Port = 8000
    scheme: Scheme = "http"
    server: str | None = None
    labels: Labels = Field(default={})

    @field_validator("names")
    @classmethod
    def _are_distinct(cls, names: list[str]) -> list[str]:
        if not names:
            raise ValueError("is empty; give at least one name")
        if len(set(names)) < len(names):
            raise ValueError("gives a name twice; delete one")
        return names

    @field_validator("server")
    @classmethod
    def _is_an_address(cls, server: str | None) -> str | None:
        if server is not None:
            parts = urlsplit(f"//{server}")
            try:
                ip_address(parts.hostname or "")
                is_address = parts.port != 0 and not (parts.path or parts.username)
            except ValueError:
                is_address = False
            if not is_address:
                raise ValueError("must be an address, with its port where that is not 53, like 127.0.0.1:8600")
        return server


class KubernetesSettings(Section):
    service: ObjectName | None = None
    selector: Annotated[str, Field(min_length=1)] | None = None
    inference_pool: ObjectName | None = None
    objective_header: Literal["x-gateway-inference-objective", "x-llm-d-inference-objective"] | None = None
    namespace: ObjectName | None = None
    port: ObjectName | None = None
    scheme: Scheme = "http"
    api_url: str = "https://kubernetes.default.svc"
    service_account: Annotated[str, Field(pattern=r"^/")] = "/var/run/secrets/kubernetes.io/serviceaccount"
    labels: Labels = Field(default={})

    @model_validator(mode="after")
    def _follows_one_thing(self) -> Self:
        if [self.service, self.selector, self.inference_pool].count(None) != 2:
            raise ValueError(
                "needs one of service, a Service's name, selector, labels like app=vllm, and inference_pool, an "
                "InferencePool's name"
            )
        return self

    @model_validator(mode="after")
    def _a_pool_names_its_ports(self) -> Self:
        if self.inference_pool is not None and self.port is not None:
            raise ValueError("port is a port of a Service; leave it out, because the InferencePool has targetPorts")
        return self

    @model_validator(mode="after")
    def _objectives_are_of_a_pool(self) -> Self:
        if self.objective_header is not None and self.inference_pool is None:
            raise ValueError("objective_header needs inference_pool: InferenceObjectives belong to an InferencePool")
        return self

    @field_validator("api_url")
    @classmethod
    def _keeps_the_token_secret(cls, url: str) -> str:
        parts = urlsplit(url)
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        if not is_safe or not parts.hostname:
            raise ValueError("must start with https://, as it is sent a token; http:// is for this host alone")
        return url.rstrip("/")

    @property
    def label_selector(self) -> str:
        """The label selector of the EndpointSlices."""
        return self.selector or f"kubernetes.io/service-name={self.service}"


class DiscoverySettings(Section):
    dns: DnsSettings | None = None
    kubernetes: KubernetesSettings | None = None
