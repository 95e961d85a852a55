"""The variables of OpenTelemetry that a gateway heeds, as its specification has them:
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from gateway.tls import no_password

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_OWN_HEADERS = frozenset(
    {"connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding"}
)


class BadVariable(Exception):
    """A variable cannot be used. Its text names the variable, and has nothing of a header: that may be a key."""


@dataclass(frozen=True)
class OtelVariables:
    """What the variables say. A variable that is empty is not set."""

    is_disabled: bool = False
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of who makes the spans."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    has_gzip: bool = False
    authorities: str = ""
    """The file with the certificates of those whom the backend's certificate may be from; empty: the system's."""
    certificate: str = ""
    """The file with the certificate that the backend sees; empty: none."""
    key: str = ""
    delay_s: float = 5.0
    """Between two batches."""
    most_waiting: int = 512
    """Traces that wait to be sent."""
    batch: int = 128
    """Traces that are sent at once."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> OtelVariables:
        """What this environment says. Raises BadVariable."""
        if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls(is_disabled=True)
        most_waiting = _number(env, "OTEL_BSP_MAX_QUEUE_SIZE", cls.most_waiting)
        return cls(
            resource=_resource(env),
            headers=_headers(env),
            has_gzip=_has_gzip(env),
            authorities=_of_exporter(env, "CERTIFICATE")[1],
            certificate=_of_exporter(env, "CLIENT_CERTIFICATE")[1],
            key=_of_exporter(env, "CLIENT_KEY")[1],
            delay_s=_number(env, "OTEL_BSP_SCHEDULE_DELAY", round(cls.delay_s * 1000)) / 1000,
            most_waiting=most_waiting,
            batch=min(most_waiting, _number(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", cls.batch)),
        )

    @property
    def has_files(self) -> bool:
        """Whether `tls_context` may be another one later."""
        return bool(self.authorities or self.certificate)

    def tls_context(self) -> ssl.SSLContext:
        """Whom the sender trusts, and what it shows. Reads the files. Raises BadVariable."""
        try:
            context = ssl.create_default_context(cafile=self.authorities or None)
        except (ssl.SSLError, OSError) as error:
            what = f"{self.authorities} is no file with certificates in PEM"
            raise BadVariable(f"OTEL_EXPORTER_OTLP_[TRACES_]CERTIFICATE: {what} ({error})") from None
        if self.certificate or self.key:
            try:
                context.load_cert_chain(self.certificate, self.key or None, password=no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                what = f"{self.certificate!r} and {self.key!r} are not a certificate and its key, in PEM"
                raise BadVariable(f"OTEL_EXPORTER_OTLP_[TRACES_]CLIENT_CERTIFICATE, …_KEY: {what} ({error})") from None
        return context


NO_VARIABLES = OtelVariables()


def _of_exporter(env: Mapping[str, str], name: str) -> tuple[str, str]:
    """The variable that counts, and its value: that for traces goes before that for everything."""
    of_traces, of_all = f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"
    return (of_traces, env[of_traces]) if env.get(of_traces) else (of_all, env.get(of_all, ""))


def _pairs(variable: str, text: str) -> Iterator[tuple[str, str]]:
    for number, part in enumerate(text.split(","), 1):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            yield unquote(name.strip()), unquote(value.strip())
        elif part.strip():
            raise BadVariable(f"{variable}: number {number} of its parts is not NAME=VALUE")


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    variable, text = _of_exporter(env, "HEADERS")
    headers = {name.lower(): value for name, value in _pairs(variable, text)}
    for number, (name, value) in enumerate(headers.items(), 1):
        is_value = value.isascii() and value.isprintable() and value == value.strip()
        if not _HEADER_NAME.fullmatch(name) or name in _OWN_HEADERS or not is_value:
            raise BadVariable(f"{variable}: number {number} of its parts is no header that can be sent")
    return headers


def _resource(env: Mapping[str, str]) -> dict[str, str]:
    resource = dict(_pairs("OTEL_RESOURCE_ATTRIBUTES", env.get("OTEL_RESOURCE_ATTRIBUTES", "")))
    if service := env.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    try:
        "".join([*resource, *resource.values()]).encode()
    except UnicodeEncodeError:
        raise BadVariable("OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES: not in UTF-8") from None
    return resource


def _has_gzip(env: Mapping[str, str]) -> bool:
    variable, text = _of_exporter(env, "COMPRESSION")
    text = text.strip()
    if text.lower() not in ("", "none", "gzip"):
        raise BadVariable(f"{variable}: {text!r} is not gzip, and not none")
    return text.lower() == "gzip"


def _number(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise BadVariable(f"{variable}: {text!r} is not a whole number above 0")
    return int(text)
