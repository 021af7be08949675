"""Actor that Ray runs for each rank of an engine, on a node with free resources."""

import os

from quire.engine.ranks.dial_in import Address
from quire.engine.ranks.keeper import Place, keep


class RankActor:
    """Actor that runs a rank as a child of its process."""

    def keep(self, core: tuple[str, int], secret: bytes, rank: int, has_before: bool) -> str:
        """Run the rank until it ends; return how it ended. has_before: whether there is a previous
        stage. If the node's raylet has ended, exit the process at once; Ray itself is slower."""
        node = os.getppid()
        how = keep(Address(*core), secret, Place(rank, has_before)).how
        if os.getppid() != node:
            os._exit(1)
        return how
