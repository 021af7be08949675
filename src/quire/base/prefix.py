"""What a prompt's prefix was found to be, for events and answers."""

import msgspec

# Why not all whole blocks of a prompt were found (`PrefixReport.miss`)
NEW = "new"  # nothing like it was there; at_token: where the nearest prompt ends, if there is one
DIVERGED = "diverged"  # the nearest prompt differs at at_token
EVICTED = "evicted"  # it was there, and had to make room
COMPUTING = "computing"  # another request was just computing it
COSTLY = "costly"  # it is in host memory, and to load it would have taken longer
SALT = "salt"  # it is there, under another salt, and nothing under this one
UNREAD = "unread"  # the request wanted to know of its prompt what is not cached
OFF = "off"  # there is no prefix cache


class PrefixReport(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Prompt tokens that were not computed, by where they were, and why there were no more of them.

    held: of the request that this one goes on from.
    store: fetched for this request from outside of the process, and loaded from host memory as
    those under `host` were. at_token: place in the prompt, -1 is not known. near_id: request with
    the nearest prompt; near_is_own: it is of the same tenant. lost_s: seconds since the eviction,
    -1.0 is not known. num_other_tokens: what another salt would have found, if no block was found.
    """

    device: int = 0
    pinned: int = 0
    host: int = 0
    store: int = 0
    miss: str = ""
    at_token: int = -1
    near_id: str = ""
    near_is_own: bool = False
    lost_s: float = -1.0
    num_other_tokens: int = 0
    held: int = 0

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all tiers."""
        return self.device + self.pinned + self.held + self.host + self.store
