"""Step times of ranks."""

from dataclasses import dataclass


@dataclass
class RankTimes:
    """Totals of one rank. seconds: time of all steps. expert_pairs: token-expert pairs computed, as
    its last heartbeat reports; 0 without experts or where they are not counted."""

    num_steps: int = 0
    seconds: float = 0.0
    expert_pairs: int = 0
