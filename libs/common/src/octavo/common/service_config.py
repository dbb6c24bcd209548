"""Base of the four services' settings: flags, environment, one YAML file, in this order of strength."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, FilePath, PlainSerializer, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from octavo.common.links import Address, TlsFiles
from octavo.common.logs import LogFormat, LogLevel
from octavo.common.registry.open import RegistrySetting


def _parse_address(value: Any) -> Any:
    return Address.parse(value) if isinstance(value, str) else value


AddressSetting = Annotated[Address, NoDecode, BeforeValidator(_parse_address), PlainSerializer(str)]
"""An address written `frames://PATH`, `grpc://HOST:PORT` or `grpc+unix://PATH`."""


def split_list(value: Any) -> Any:
    """Environment variables and flags give one text for the whole list."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return parts
    return [piece for part in parts for piece in (part.split(",") if isinstance(part, str) else [part])]


AddressListSetting = Annotated[list[AddressSetting], NoDecode, BeforeValidator(split_list)]
"""Addresses separated by commas; as a flag it may also be repeated, in YAML it is a list."""


class ServiceConfig(BaseSettings):
    """Settings that every service has. A subclass adds its own, and its `env_prefix`."""

    model_config = SettingsConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        arbitrary_types_allowed=True,
    )

    config: FilePath | None = None
    """YAML file with settings of this service, by the names shown here."""

    log_level: LogLevel = "info"
    """Least severe log line that is written."""

    log_format: LogFormat = "console"
    """`console` for people, `json` for collectors."""

    metrics_listen: str | None = Field(default=None, pattern=r":[0-9]{1,5}$")
    """HOST:PORT where /metrics, /health/live and /health/ready are served over HTTP; unset serves none."""

    registry: RegistrySetting | None = None
    """Where members of the deployment find one another: `redis://HOST:PORT/DB`, or `file://PATH` of a list of them.
    Unset: services are where the settings say."""

    registry_ttl_s: float = Field(default=10.0, ge=0.5)
    """Seconds after which a member that is not heard of is taken for dead. It registers three times as often."""

    advertise: AddressListSetting = []
    """Where other members reach this service; unset: where it listens, with the host's name for 0.0.0.0. The first is
    for its stream, the first of gRPC for other calls."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """OpenTelemetry collector for OTLP over HTTP (http://HOST:4318), to which traces are sent; unset makes none."""

    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of traces that are kept, of those that begin here; a caller's `traceparent` decides for its own."""

    drain_grace_s: float = Field(default=5.0, ge=0)
    """Seconds that running work is given after SIGTERM or SIGINT."""

    link_ca: FilePath | None = None
    """PEM file of the CA of all services. With link_cert and link_key, links to other services over TCP are mutual TLS;
    `octavo certs` makes such files."""

    link_cert: FilePath | None = None
    """PEM file with this service's certificate for its role, ROLE.octavo.internal. May be renewed in place."""

    link_key: FilePath | None = None
    """PEM file with the certificate's private key."""

    @property
    def link_tls(self) -> TlsFiles | None:
        """What links over TCP are secured by, if they are."""
        if self.link_ca is None or self.link_cert is None or self.link_key is None:
            return None
        return TlsFiles(self.link_ca, self.link_cert, self.link_key)

    @model_validator(mode="after")
    def _link_tls_is_whole(self) -> Self:
        files = {"link_ca": self.link_ca, "link_cert": self.link_cert, "link_key": self.link_key}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"TLS between services needs {', '.join(missing)} as well")
        if self.link_tls is not None:
            self.link_tls.check()
        return self

    @model_validator(mode="after")
    def _environment_has_no_others(self) -> Self:
        """A misspelt name would leave its setting at the default without a word."""
        prefix, known = self.model_config["env_prefix"], type(self).model_fields
        for name in os.environ:
            setting = name.upper().removeprefix(prefix).lower()
            if prefix and name.upper().startswith(prefix) and setting not in known:
                near = difflib.get_close_matches(setting, known, n=1)
                raise ValueError(f"{name} is no setting{f'; {prefix}{near[0].upper()} is' if near else ''}")
        return self

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None) -> Self:
        """Read flags, environment and file. Prints what is wrong and exits with status 2 if they do not fit."""
        try:
            return cls(_cli_parse_args=sys.argv[1:] if arguments is None else arguments)
        except ValidationError as error:
            for problem in error.errors():
                name = ".".join(str(part) for part in problem["loc"])
                said = problem["msg"].removeprefix("Value error, ")
                print(": ".join(filter(None, (cls.__name__, name, said))), file=sys.stderr)
            raise SystemExit(2) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Strongest first. The command line source is put in front of these by pydantic-settings itself."""
        return init_settings, env_settings, _YamlFile(settings_cls)


class _YamlFile(YamlConfigSettingsSource):
    """The file that `config` names on the command line or in the environment."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, yaml_file=None)

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return self._read_files(Path(path)) if path else {}


__all__ = ["AddressListSetting", "AddressSetting", "ServiceConfig", "split_list"]
