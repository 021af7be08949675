"""What the steps of ranks took."""

from dataclasses import dataclass


@dataclass
class RankTimes:
    """Of one rank. seconds: of all steps. expert_pairs: how often tokens were sent to its experts,
    as it said last; 0 of models without experts, and where that is not counted."""

    num_steps: int = 0
    seconds: float = 0.0
    expert_pairs: int = 0
