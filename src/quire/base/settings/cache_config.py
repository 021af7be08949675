"""Settings of the KV cache: its memory and its stores."""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.plugins import BLOCK_HASHES, EVICTION_POLICIES
from quire.base.settings.fields import setting
from quire.base.settings.kv_transfer import (
    COMPUTED,
    CONSUMER,
    EVICTED,
    NOTHING,
    PRODUCER,
    TransferConfig,
    parse_transfer,
)
from quire.base.settings.secrets import SecretJson, SecretUrl, wrap_secrets

SERVE = "serve:"  # prefix of a store that offers this engine's host memory to peers


@dataclass(frozen=True)
class CacheConfig:
    """The settings of the KV cache."""

    block_size: int = setting(16, "size of a KV block", unit="tokens")
    gpu_memory_utilization: float = setting(
        0.92, "share of GPU memory for this process; above 0, at most 1"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "size of the KV pool; by default derived from free memory", unit="bytes"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "data type of cached keys and values: the model's (`auto`), `int8`, or `fp8` (on CPUs, and"
        " on GPUs of compute capability 8.9 or later)",
        choices=("auto", "int8", "fp8"),
        words={"fp8_e4m3": "fp8"},
    )
    enable_prefix_caching: bool = setting(True, "reuse cached KV blocks of shared prefixes")
    prefix_caching_hash_algo: str = setting(
        "sha256",
        "hash that names cached blocks; engines that share blocks must use the same one",
        choices=("sha256", "blake2b"),
        words={"sha256_cbor": "sha256"},
        plugins=BLOCK_HASHES,
    )
    eviction_policy: str = setting(
        "lru",
        "cached block to evict first: the least recently used (`lru`) or the least often"
        " used (`lfu`)",
        choices=("lru", "lfu"),
        plugins=EVICTION_POLICIES,
    )
    pin_prefix: str | None = setting(
        None,
        "file with a prefix to compute at start and keep cached: text, or JSON as for"
        " `POST /v1/prefixes`",
        is_path=True,
    )
    kv_host_gb: float | None = setting(
        None,
        "host memory for KV blocks evicted from the pool; by default 0 on a CPU, the size of the"
        " pool on a GPU",
        unit="GB",
    )
    kv_disk_dir: str | None = setting(
        None,
        "directory for KV blocks, which survives restarts; engines of one model may share it",
        is_path=True,
    )
    kv_disk_gb: float = setting(
        10.0, "maximum size of a store of KV blocks in a directory or in memory", unit="GB"
    )
    kv_store: tuple[str, ...] = setting(
        (),
        "shared stores of KV blocks, nearest first: `dir:PATH`, `shm:NAME`, `serve://HOST:PORT`,"
        " `peer://HOST:PORT`, `redis://HOST:PORT`, `s3://BUCKET/PREFIX`, or `NAME:ADDRESS` of an"
        " installed package",
        secrecy=SecretUrl,
    )
    kv_eager: bool = setting(
        False, "write KV blocks to the stores when they are computed, not when they are evicted"
    )
    kv_transfer_config: str | None = setting(
        None,
        "JSON for disaggregated prefill, in vLLM's form: kv_role `kv_producer`, `kv_consumer` or"
        " `kv_both`; blocks go through `--kv-store`",
        secrecy=SecretJson,
    )
    watermark: float = setting(0.01, "share of the KV blocks kept free when a request is admitted")

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")  # canonical name
        if self.prefix_caching_hash_algo == "sha256_cbor":
            object.__setattr__(self, "prefix_caching_hash_algo", "sha256")
        stores = (self.kv_store,) if isinstance(self.kv_store, str) else tuple(self.kv_store or ())
        object.__setattr__(self, "kv_store", stores)
        wrap_secrets(self)
        if self.transfer.needs_store and not self.stores:
            raise ConfigError(
                f"kv_transfer_config={self.kv_transfer_config!r} needs a store that both engines"
                " reach; add --kv-store, such as shm:NAME or peer://HOST:PORT."
            )
        if self.kv_eager and not self.stores:
            raise ConfigError(
                "kv_eager needs a store to write blocks to; add --kv-store or --kv-disk-dir."
            )
        if self.kv_eager and self.transfer.role == CONSUMER:
            raise ConfigError(
                f"kv_eager writes blocks to stores, and a {CONSUMER} writes none; remove one."
            )

    @property
    def transfer(self) -> TransferConfig:
        """Return the parsed kv_transfer_config."""
        return parse_transfer(self.kv_transfer_config)

    @property
    def kept(self) -> str:
        """Return which blocks go to the stores: NOTHING, EVICTED or COMPUTED."""
        role = self.transfer.role
        if role == CONSUMER:
            return NOTHING
        return COMPUTED if self.kv_eager or role == PRODUCER else EVICTED

    @property
    def stores(self) -> list[str]:
        """Return the configured stores as NAME:ADDRESS, nearest first."""
        disk = [] if self.kv_disk_dir is None else [f"dir:{self.kv_disk_dir}"]
        return list(dict.fromkeys([*disk, *self.kv_store, *self.transfer.stores]))
