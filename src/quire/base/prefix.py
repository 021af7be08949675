"""The prefix hit of a prompt, and the reason for its miss, for events and responses."""

import msgspec

# Reasons why not all whole blocks of a prompt were cached (`PrefixReport.miss`)
NEW = "new"  # the prompt is new; at_token: end of the nearest prompt, if there is one
DIVERGED = "diverged"  # the nearest prompt differs at at_token
EVICTED = "evicted"  # the block was cached, but evicted
COMPUTING = "computing"  # another request was computing the block
COSTLY = "costly"  # the block is in host memory, but loading takes longer than computing
SALT = "salt"  # the block is cached under another salt only
UNREAD = "unread"  # the request needs results for its prompt that are not cached
OFF = "off"  # the prefix cache is disabled


class PrefixReport(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Cached tokens of a prompt by their source, and the reason for the miss after them."""

    device: int = 0  # tokens of blocks on the device
    pinned: int = 0  # tokens of a pinned prefix
    host: int = 0  # tokens loaded from host memory
    store: int = 0  # tokens fetched from a store for this request, then loaded like host's
    miss: str = ""  # one of the reasons above
    at_token: int = -1  # index in the prompt; -1 if unknown
    near_id: str = ""  # request with the nearest prompt
    near_is_own: bool = False  # whether that request is of the same tenant
    lost_s: float = -1.0  # seconds since the eviction; -1.0 if unknown
    num_other_tokens: int = 0  # tokens cached under another salt, if none are under this one
    held: int = 0  # tokens of the retained request that this one continues

    @property
    def num_tokens(self) -> int:
        """The cached tokens of all sources together."""
        return self.device + self.pinned + self.held + self.host + self.store
