"""Beam search without a model: an executor whose candidates make the beams branch.

The branching of beams depends on two things, each described by a number.

The first is the fall of probabilities from the best token to the next ones: a Poisson-Dirichlet
distribution. The k-th best token has p_k proportional to g_k ** -a, where g_k is a sum of k
exponentials. So some positions are sure and others open, as in text. `sureness` is the mean over
positions of the sum of p_k ** 2, the chance that two draws give the same token. It is 1 - 1 / a;
the mean entropy is digamma(1) - digamma(sureness) nats: 2.0 at 0.4, 1.0 at 0.6, 0.4 at 0.8, 0.2 at
0.9.

The second is the similarity of a request's beams: beams that differ in an early word continue in
the same way. At a share `same_share` of the positions all beams of a request have the same
candidates with the same probabilities. At the others each has its own. Common candidates do not
change the order of beams, so that several survive for longer.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.virtual.dry_run import VOCAB_SIZE
from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import Candidates, Plan, StepResult
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.executors.executor import Executor

NUM_DRAWN = 64  # tokens whose probabilities are drawn; of the others, the expected sum
Float64 = npt.NDArray[np.float64]


def random_logprobs(num: int, sureness: float, rng: np.random.Generator) -> Float64:
    """Return log-probabilities of the most probable tokens of `num` positions, falling. [num,
    NUM_DRAWN]

    sureness: in (0, 1).
    """
    power = 1 / (1 - sureness)
    arrivals = rng.exponential(size=(num, NUM_DRAWN)).cumsum(1)
    last = arrivals[:, -1]
    weights = -power * np.log(arrivals)
    others = (1 - power) * np.log(last) - np.log(power - 1)  # the integral from there on
    total = np.logaddexp(np.logaddexp.reduce(weights, axis=1), others)
    logprobs: Float64 = weights - total[:, None]
    return logprobs


class BranchingExecutor:
    """Random tokens, and candidates for the rows that ask for them."""

    def __init__(
        self, executor: Executor, sureness: float, same_share: float = 0.0, seed: int = 0
    ) -> None:
        self._executor = executor
        self._sureness = sureness
        self._same_share = same_share
        self._rng = np.random.default_rng(seed)
        self._plans: deque[Plan] = deque()
        self._group_of: dict[int, int] = {}  # row -> the group that it belongs to
        self._num_groups = 0

    def start(self, on_result: Callable[[], None]) -> None:
        self._executor.start(on_result)

    def copy_bytes_per_s(self) -> float:
        return self._executor.copy_bytes_per_s()

    def is_ready(self) -> bool:
        return self._executor.is_ready()

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self._executor.submit(plan)
        self._plans.append(plan)

    def next_result(self) -> StepResult:
        plan = self._plans.popleft()
        return self._executor.next_result().replace(candidates=self._candidates(plan))

    def close(self) -> None:
        self._executor.close()

    def _candidates(self, plan: Plan) -> dict[int, Candidates]:
        """Return candidates by row. The chosen token, which comes first, is the most probable
        one."""
        self._follow(plan)
        max_candidates = int(plan.num_candidates.max(initial=0))
        assert max_candidates <= NUM_DRAWN, f"{max_candidates} candidates are more than are drawn"
        with_candidates = np.flatnonzero(plan.num_candidates > 0)
        rows = plan.sample_rows[with_candidates].tolist()
        logprobs = random_logprobs(len(rows), self._sureness, self._rng).astype(np.float32)
        first = self._rng.integers(0, VOCAB_SIZE, (len(rows), 1))
        token_ids = ((first + np.arange(NUM_DRAWN)) % VOCAB_SIZE).astype(np.int32)
        source = self._sources(rows)
        found = {}
        for i, row, num in zip(
            source, rows, plan.num_candidates[with_candidates].tolist(), strict=True
        ):
            columns = [0, *range(num)]
            found[row] = Candidates(token_ids[i, columns], logprobs[i, columns], 1)
        return found

    def _follow(self, plan: Plan) -> None:
        """Note which rows belong together."""
        for start in plan.started:
            self._group_of[start.row] = self._num_groups
            self._num_groups += 1
        for fork in plan.forked:
            self._group_of[fork.child] = self._group_of[fork.parent]

    def _sources(self, rows: list[int]) -> list[int]:
        """Return the draw of each row: its own, or its group's first row's."""
        first: dict[int, int] = {}
        shares: dict[int, bool] = {}
        source = []
        for i, row in enumerate(rows):
            group = self._group_of[row]
            if group not in first:
                first[group] = i
                shares[group] = bool(self._rng.random() < self._same_share)
            source.append(first[group] if shares[group] else i)
        return source


def group_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int, num: int, beams: bool
) -> Request:
    """Make a request for `num` samples, or for a beam search of this width; length alone ends
    it."""
    params = SamplingParams(
        n=num,
        use_beam_search=beams,
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return Request(request_id, prompt_token_ids, params, seed=0)
