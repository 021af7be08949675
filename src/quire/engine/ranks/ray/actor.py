"""What Ray runs for each rank of an engine, on the node that has room for it."""

import os

from quire.engine.ranks.dial_in import Address
from quire.engine.ranks.keeper import Place, keep


class RankActor:
    """Keeps a rank, which is a child of the actor's process."""

    def keep(self, core: tuple[str, int], secret: bytes, rank: int, has_before: bool) -> str:
        """Keep it until it ends; returns how it did. has_before: there is a stage before its. The
        process ends with its node's (raylet), which Ray itself takes its time for."""
        node = os.getppid()
        how = keep(Address(*core), secret, Place(rank, has_before)).how
        if os.getppid() != node:
            os._exit(1)
        return how
