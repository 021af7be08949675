"""The settings of the KV cache: its memory, and the stores that blocks are kept in."""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.kv_transfer import (
    COMPUTED,
    CONSUMER,
    EVICTED,
    NOTHING,
    PRODUCER,
    TransferConfig,
    parse_transfer,
)
from quire.base.plugins import BLOCK_HASHES, EVICTION_POLICIES
from quire.base.secrets import SecretJson, SecretUrl, wrap_secrets
from quire.base.settings import setting

SERVE = "serve:"  # begins a store that is this engine's host memory, for its peers


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache and the memory that it may take."""

    block_size: int = setting(16, "tokens per block", unit="tokens")
    gpu_memory_utilization: float = setting(
        0.92, "share of the GPU's memory that this process may use, whatever others do"
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV pool, in which states of layers with linear attention have half at most;"
        " derived from the memory plan if absent",
        unit="bytes",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "how keys and values are stored: in the model's dtype; as int8, with a scale for each token"
        " and head (on a CPU, or on a GPU by triton); or as fp8 (e4m3), with two scales for each"
        " layer from the checkpoint, or 1 (on a GPU of compute capability 8.9 or more, by triton)."
        " States of layers with linear attention are never rounded. fp8_e4m3 is vLLM's name of fp8",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool = setting(True, "reuse full blocks of equal prefixes")
    prefix_caching_hash_algo: str = setting(
        "sha256",
        "hash that names cached blocks; engines that share blocks need the same one. sha256_cbor is"
        " vLLM's name of sha256; blake2b needs no SHA instructions of the CPU to be fast",
        choices=("sha256", "sha256_cbor", "blake2b"),
        plugins=BLOCK_HASHES,
    )
    eviction_policy: str = setting(
        "lru",
        "which cached block is evicted first: the least recently used one (lru), or the one with"
        " the fewest recent hits (lfu), so that prompts which are used once do not evict popular"
        " ones",
        choices=("lru", "lfu"),
        plugins=EVICTION_POLICIES,
    )
    pin_prefix: str | None = setting(
        None,
        "file with a prefix to compute at the start and to keep: a text, or as .json what"
        " POST /v1/prefixes takes, or a list of it",
        is_path=True,
    )
    kv_host_gb: float | None = setting(
        None,
        "host memory for cached blocks that the KV pool has no room for, which come back as prefix"
        " hits; if absent none on a CPU, on a GPU as much as the pool",
        unit="GB",
    )
    kv_disk_dir: str | None = setting(
        None,
        "directory for cached blocks, which outlives the engine; engines of one model share it",
        is_path=True,
    )
    kv_disk_gb: float = setting(
        10.0, "most that a directory or a store in memory may hold", unit="GB"
    )
    kv_store: tuple[str, ...] = setting(
        (),
        "stores of cached blocks, nearest first, which engines share: dir:PATH, shm:NAME (memory of"
        " this machine), serve://HOST:PORT (this engine's host memory, for others) and peer://HOST:PORT"
        " (another's), redis://HOST:PORT, s3://BUCKET/PREFIX, or NAME:ADDRESS of another package",
        secrecy=SecretUrl,
    )
    kv_eager: bool = setting(
        False,
        "give blocks to the stores as soon as they are computed; if not, when they leave the pool,"
        " or when a request asks for it (kv_transfer_params)",
    )
    kv_transfer_config: str | None = setting(
        None,
        "vLLM's JSON of an engine that computes prompts for others (kv_role kv_producer), goes on"
        " with others' (kv_consumer), or both; blocks go through kv_store",
        secrecy=SecretJson,
    )
    watermark: float = setting(0.01, "share of the blocks kept free when a request is admitted")

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")  # one name from here on
        if self.prefix_caching_hash_algo == "sha256_cbor":
            object.__setattr__(self, "prefix_caching_hash_algo", "sha256")
        stores = (self.kv_store,) if isinstance(self.kv_store, str) else tuple(self.kv_store or ())
        object.__setattr__(self, "kv_store", stores)
        wrap_secrets(self)
        if self.transfer.needs_store and not self.stores:
            raise ConfigError(
                f"kv_transfer_config={self.kv_transfer_config!r} needs a store that both engines"
                " reach; add one, such as --kv-store shm:NAME or --kv-store peer://HOST:PORT."
            )
        if self.kv_eager and not self.stores:
            raise ConfigError("kv_eager needs a store to give blocks to; add kv_store.")
        if self.kv_eager and self.transfer.role == CONSUMER:
            raise ConfigError(
                f"kv_eager gives blocks to stores, and a {CONSUMER} gives none; leave one out."
            )

    @property
    def transfer(self) -> TransferConfig:
        """Return what kv_transfer_config says."""
        return parse_transfer(self.kv_transfer_config)

    @property
    def kept(self) -> str:
        """Return what is given to the stores."""
        role = self.transfer.role
        if role == CONSUMER:
            return NOTHING
        return COMPUTED if self.kv_eager or role == PRODUCER else EVICTED

    @property
    def stores(self) -> list[str]:
        """Return the stores that are asked for, each as NAME:ADDRESS, nearest first."""
        disk = [] if self.kv_disk_dir is None else [f"dir:{self.kv_disk_dir}"]
        return list(dict.fromkeys([*disk, *self.kv_store, *self.transfer.stores]))
