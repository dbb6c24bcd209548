"""API keys and their tenants: one document, as a file, an environment variable or a value in Redis has it.

Keys are drawn with 256 random bits, so that a plain SHA-256 of one cannot be searched. The key itself is nowhere kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

_KEY_PREFIX = "sk-octavo-"
_KEY_BYTES = 32
_ID_DIGITS = 12

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class KeyBookError(ValueError):
    """The document is not what it should be. The message names the place."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tenant(_Part):
    """What a tenant may do. A limit that is not given does not exist."""

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    """Prompt and output tokens together."""
    max_concurrent: PositiveInt | None = None
    """Requests that are answered at once."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Of all its requests; lower is served first."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many of its requests are begun for each one of a tenant of weight 1, where both wait at one priority."""
    operator: bool = False
    """May see what is of all tenants: metrics, the KV cache."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)


class ApiKey(_Part):
    """A key, by its hash."""

    tenant: TenantName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key as the client sends it, in hexadecimal."""
    created: datetime | None = None
    note: Annotated[str, Field(max_length=200)] = ""

    @property
    def key_id(self) -> str:
        """Names it for people, in logs too."""
        return self.sha256[:_ID_DIGITS]


class KeyBook(_Part):
    """All tenants and keys."""

    tenants: dict[TenantName, Tenant] = {}
    keys: tuple[ApiKey, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> KeyBook:
        unknown = {key.tenant for key in self.keys} - self.tenants.keys()
        if unknown:
            raise ValueError(f"keys name tenants that are not there: {', '.join(sorted(unknown))}")
        if len({key.key_id for key in self.keys}) < len(self.keys):
            raise ValueError("a key is listed twice")
        return self

    @classmethod
    def parse(cls, text: str) -> KeyBook:
        """From YAML, of which JSON is a part. Raises KeyBookError."""
        try:
            return cls.model_validate(yaml.safe_load(text) or {})
        except yaml.YAMLError as error:
            raise KeyBookError(f"not YAML: {error}") from None
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise KeyBookError(": ".join(part for part in (place, problem["msg"]) if part)) from None

    def text(self) -> str:
        """As YAML."""
        body = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump({"tenants": {}, "keys": [], **body}, sort_keys=False)

    def with_key(self, name: str, tenant: Tenant, note: str = "") -> tuple[KeyBook, str]:
        """The book with a new key of a tenant, which is added or changed; and the key. Raises KeyBookError."""
        key = _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        entry = {"tenant": name, "sha256": digest(key), "created": datetime.now(UTC).replace(microsecond=0)}
        try:
            added = ApiKey.model_validate({**entry, "note": note})
            return KeyBook(tenants={**self.tenants, name: tenant}, keys=(*self.keys, added)), key
        except ValidationError as error:
            raise KeyBookError(error.errors(include_input=False)[0]["msg"]) from None

    def without_key(self, key_id: str) -> KeyBook:
        """The book without that key. Raises KeyBookError if there is none."""
        kept = tuple(key for key in self.keys if key.key_id != key_id)
        if len(kept) == len(self.keys):
            raise KeyBookError(f"there is no key {key_id!r}; octavo keys list shows all")
        return KeyBook(tenants=self.tenants, keys=kept)


class KeyIndex:
    """Finds the key that a client sent."""

    def __init__(self, book: KeyBook) -> None:
        self.book = book
        self._by_id = {key.key_id: key for key in book.keys}

    def find(self, given: str) -> ApiKey | None:
        """The comparison takes the same time however much of the hash agrees."""
        hashed = digest(given)
        key = self._by_id.get(hashed[:_ID_DIGITS])
        return key if key is not None and hmac.compare_digest(key.sha256, hashed) else None


def digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
