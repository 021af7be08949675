"""Results of a step other than tokens: log-probabilities, vectors, and values of tokens."""

from quire.base.plan import StepResult
from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.sequence import State
from quire.scheduler.decisions import OutputsBuilder


def take_extras(step: InFlightStep, result: StepResult, outputs: OutputsBuilder) -> None:
    """Add the log-probabilities of prompt positions, the vectors of pooled prompts, and the values
    of computed tokens.

    Each prompt position is reported once, even if it is recomputed; values again. A sequence that
    has lost its row meanwhile still gets all: it resumes after these positions, or ends.
    """
    for i, row in enumerate(step.plan.rows.tolist() if result.prompt_candidates else ()):
        candidates = result.prompt_candidates.get(row)
        sequence = step.row_sequences[i]
        if candidates is None or row in step.omitted or sequence.state is State.ENDED:
            continue
        start = int(step.plan.computed_bound[i])
        fresh = candidates[max(0, sequence.num_prompt_logprobs - start) :]
        sequence.num_prompt_logprobs += len(fresh)
        sequence.found_at = -1  # a longer prefix hit may be allowed now
        sequence.found_elsewhere = {}
        outputs.update_of(sequence).prompt_candidates = fresh
    sampling = step.sampling
    for row, pooled in result.pooled.items():
        sequence = sampling[row]
        if row not in step.omitted and sequence.state is not State.ENDED:
            outputs.update_of(sequence).pooled = pooled
    holders = step.holders_of([*result.token_values]) if result.token_values else {}
    for row, values in result.token_values.items():  # of recomputed tokens once more
        sequence = holders[row]
        if row not in step.omitted and sequence.state is not State.ENDED:
            outputs.update_of(sequence).token_values = values


def take_candidates(step: InFlightStep, result: StepResult, outputs: OutputsBuilder) -> None:
    """Add the log-probabilities of sampled tokens. Beams report none: their search chooses
    tokens."""
    sampling = step.sampling
    for row, candidates in result.candidates.items():
        if row not in step.omitted and not sampling[row].is_beam:
            more = result.more_candidates.get(row, [])
            outputs.set_candidates(sampling[row], [candidates, *more])
