"""The KV manager's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from octavo.common.block_hash import HashAlgorithm, digest_function
from octavo.common.links import Address
from octavo.common.service_config import AddressListSetting, ServiceConfig
from octavo.kvmanager.block_pool import PROTECTED_SHARE
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.kvmanager.pool import PoolSettings


class KvManagerConfig(ServiceConfig):
    """Which blocks hold a sequence: the KV-cache manager of one or more worker groups."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_KVMANAGER_", cli_prog_name="octavo-kvmanager")

    listen: AddressListSetting = Field(default=[Address("grpc", "127.0.0.1:7102")], min_length=1)
    """Where schedulers connect: frames://PATH, grpc://HOST:PORT, grpc+unix://PATH."""

    pool_id: str = "default"
    """With a registry: the pool that this KV manager takes the lease of."""

    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Share of a pool's blocks that an admission leaves available, so that running sequences can grow."""

    hash_secret: SecretStr = SecretStr("")
    """Enters every block hash, so that nobody outside can build one. The same for all members of a deployment."""

    max_sinking_blocks: int = Field(default=64, ge=0)
    """Evicted prefix blocks that one step may send to host memory; more are dropped."""

    min_host_hit_blocks: int = Field(default=1, ge=1)
    """Shorter runs of prefix blocks in host memory are computed again instead of restored."""

    hash_algorithm: HashAlgorithm = "sha256"
    """xxh3_128 is faster and can be forged: only where tenants trust one another. Needs the package xxhash."""

    protected_share: float = Field(default=PROTECTED_SHARE, ge=0, lt=1)
    """Share of a pool's blocks that may be cached prefixes which were hit and outlive those that were not; 0 is plain
    least recently used."""

    catalogue_dir: Path | None = None
    """Folder for what every block holds, one file per pool, so that cached prefixes outlive a death of this process.
    Best in memory (tmpfs). Unset: only blocks of running sequences are known again."""

    check_ledger: bool = False
    """Check the books of the pool after every message. Slow; for tests."""

    @property
    def pool_settings(self) -> PoolSettings:
        return PoolSettings(
            watermark=self.watermark,
            hash_secret=self.hash_secret.get_secret_value().encode(),
            hash_algorithm=self.hash_algorithm,
            protected_share=self.protected_share,
            host_tier=HostTierSettings(self.max_sinking_blocks, self.min_host_hit_blocks),
        )

    @field_validator("hash_algorithm")
    @classmethod
    def _algorithm_is_installed(cls, algorithm: HashAlgorithm) -> HashAlgorithm:
        try:
            digest_function(algorithm)
        except ImportError as error:
            raise ValueError(f"{algorithm} needs a package that is not installed: {error}") from error
        return algorithm
