"""The KV manager's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from octavo.common.links import Address
from octavo.common.service_config import AddressListSetting, ServiceConfig
from octavo.kvmanager.pool import PoolSettings


class KvManagerConfig(ServiceConfig):
    """Which blocks hold a sequence: the KV-cache manager of one or more worker groups."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_KVMANAGER_", cli_prog_name="octavo-kvmanager")

    listen: AddressListSetting = Field(default=[Address("grpc", "127.0.0.1:7102")], min_length=1)
    """Where schedulers connect: frames://PATH, grpc://HOST:PORT, grpc+unix://PATH."""

    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Share of a pool's blocks that an admission leaves available, so that running sequences can grow."""

    hash_secret: SecretStr = SecretStr("")
    """Enters every block hash, so that nobody outside can build one. The same for all members of a deployment."""

    catalogue_dir: Path | None = None
    """Folder for what every block holds, one file per pool, so that cached prefixes outlive a death of this process.
    Best in memory (tmpfs). Unset: only blocks of running sequences are known again."""

    check_ledger: bool = False
    """Check the books of the pool after every message. Slow; for tests."""

    @property
    def pool_settings(self) -> PoolSettings:
        return PoolSettings(self.watermark, self.hash_secret.get_secret_value().encode())
