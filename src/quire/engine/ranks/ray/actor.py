"""Actor that Ray runs for each rank of an engine, on a node with free resources."""

import os

from quire.engine.ranks.connections import Address
from quire.engine.ranks.node_agent import RankAssignment, run_rank


class RankActor:
    """Actor that runs a rank as a child of its process."""

    def run_rank(self, core: tuple[str, int], secret: bytes, rank: int, has_before: bool) -> str:
        """Run the rank until it ends; return how it ended. has_before: whether there is a previous
        stage. If the node's raylet has ended, exit the process at once; Ray itself is slower."""
        node = os.getppid()
        end_text = run_rank(Address(*core), secret, RankAssignment(rank, has_before)).end_text
        if os.getppid() != node:
            os._exit(1)
        return end_text
