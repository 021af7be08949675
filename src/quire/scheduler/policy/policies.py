"""Choice by name of scheduling policies, eviction policies and block hashes.

The names are built in, or plug-ins of other packages. A plug-in is checked when it is loaded, so
that a faulty one is reported at startup.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from quire.base import plugins
from quire.base.errors import ConfigError
from quire.base.plugins import PluginKind, load_plugin
from quire.base.settings.kv_transfer import DIGEST_BYTES
from quire.kv.digest import BlockHash
from quire.kv.pool import EvictionPolicy, MakeEviction
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.policy.lfu import Lfu
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel

Chosen = TypeVar("Chosen")
DIGEST_PART = 8  # bytes of a truncated name that must identify a block, as in KV events
POLICIES: Mapping[str, MakePolicy] = MappingProxyType(
    {"fifo": Fifo, "fcfs": Fifo, "priority": Fifo, "srtf": Srtf, "two-level": TwoLevel}
)
EVICTION_POLICIES: Mapping[str, MakeEviction] = MappingProxyType({"lru": OrderedDict, "lfu": Lfu})
BLOCK_HASHES: Mapping[str, BlockHash] = MappingProxyType(
    {
        "sha256": hashlib.sha256,
        "sha256_cbor": hashlib.sha256,
        "blake2b": partial(hashlib.blake2b, digest_size=DIGEST_BYTES),
    }
)


class _Nothing:
    """Progress of a scheduler without requests."""

    num_planned_tokens = 0

    def remaining(self, sequence: Sequence) -> int:
        return 0

    def num_tokens_under_way(self) -> int:
        return 0


def make_policy(name: str) -> MakePolicy:
    """Return the factory of a policy's queues. Raise ConfigError for an unknown name."""
    return _chosen(plugins.POLICIES, name, POLICIES, _check_policy)


def make_eviction(name: str) -> MakeEviction:
    """Return the factory of a pool's eviction policy. Raise ConfigError for an unknown name."""
    return _chosen(plugins.EVICTION_POLICIES, name, EVICTION_POLICIES, _check_eviction)


def make_block_hash(name: str) -> BlockHash:
    """Return the hash function of this name. Raise ConfigError for an unknown name."""
    return _chosen(plugins.BLOCK_HASHES, name, BLOCK_HASHES, _check_hash)


def _chosen(
    kind: PluginKind, name: str, ours: Mapping[str, Chosen], check: Callable[[Chosen], str]
) -> Chosen:
    """Return the built-in choice of this name, or load the plug-in. check: returns the fault of a
    plug-in, or an empty string. Raise ConfigError for an unknown or faulty one."""
    if name in ours:
        return ours[name]
    found: Chosen = load_plugin(kind, name, ours)  # type: ignore[assignment]
    try:
        wrong = check(found)
    except Exception as error:
        raise ConfigError(
            f"the {kind.noun} {name!r} cannot be created: {type(error).__name__}: {error}."
        ) from error
    if wrong:
        raise ConfigError(f"the {kind.noun} {name!r} {wrong}.")
    return found


def _check_policy(make: MakePolicy) -> str:
    policy = make(_Nothing())
    is_empty = policy.peek() is None and not len(policy)
    return "" if is_empty else "is not empty when it is made"


def _check_eviction(make: MakeEviction) -> str:
    policy: EvictionPolicy = make()
    found = [list(policy)]
    policy[5], policy[8] = 0, 0
    policy.move_to_end(8, last=False)
    found.append(list(policy))
    del policy[8]
    found.append(list(policy))
    if found == [[], [8, 5], [5]] and len(policy) == 1:
        return ""
    return (
        "does not work as a dictionary of blocks. Empty, with 5 and then 8 moved to the front, and"
        f" without 8, it must hold [], [8, 5] and [5], got {found}"
    )


def _check_hash(block_hash: BlockHash) -> str:
    one, again, other = (block_hash(data).digest() for data in (b"one", b"one", b"other"))
    parts = [slice(i, i + DIGEST_PART) for i in range(0, DIGEST_BYTES, DIGEST_PART)]
    differs = one == again and all(one[part] != other[part] for part in parts)
    if differs and isinstance(one, bytes) and len(one) == len(other) == DIGEST_BYTES:
        return ""
    return (
        f"must return {DIGEST_BYTES} bytes, equal for equal data, that differ for other data in"
        f" each part of {DIGEST_PART} bytes; got {one!r}, {again!r} and {other!r}"
    )
