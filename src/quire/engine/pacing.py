"""When to plan the next step: late, so that requests which arrive meanwhile are in it, and early
enough that the device does not wait for it."""

from collections.abc import Collection

SHARE = 0.75  # of the time until the device runs out of plans: steps may be shorter than expected
LEAD_S = 0.002  # planning, handing over, and waking up


class Pacing:
    """Expects a step to take what the last one took, or less if it has fewer tokens.

    So it is seldom expected to take longer than it does, and where it is, nothing but one plan's
    making is lost: a result that comes early makes the core plan at once. num_stages: plans that
    are carried out at the same time, one on each; until there are so many, the next one is due.
    """

    def __init__(self, num_stages: int = 1) -> None:
        self._num_stages = num_stages
        self._num_tokens = 1
        self._duration_s = 0.0
        self._began_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that the device begins the oldest plan in flight."""
        self._began_s = now_s

    def end(self, num_tokens: int, now_s: float) -> None:
        """Note that it has carried out a plan of so many tokens, and begins the next one, if there
        is one."""
        self._num_tokens = max(1, num_tokens)
        self._duration_s = now_s - self._began_s
        self._began_s = now_s

    def due_s(self, in_flight: Collection[int]) -> float:
        """Return when to plan the next step. in_flight: tokens of the plans that are."""
        if len(in_flight) < self._num_stages:
            return self._began_s
        if SHARE * self._duration_s * len(in_flight) <= LEAD_S:
            return self._began_s
        per_token_s = self._duration_s / self._num_tokens
        expected_s = sum([min(self._duration_s, per_token_s * num) for num in in_flight])
        return self._began_s + SHARE * expected_s - LEAD_S
