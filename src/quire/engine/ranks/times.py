"""What the steps of ranks took."""

from dataclasses import dataclass


@dataclass
class RankTimes:
    """Of one rank. seconds: of all steps."""

    num_steps: int = 0
    seconds: float = 0.0
