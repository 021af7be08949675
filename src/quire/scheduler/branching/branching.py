"""Groups: the sequences of one request, which share its prompt (P 4.4) and are preempted together.

A request for n sequences begins with one of them, its leader, and holds n rows. The plan that
computes the last token of the prompt forks the leader. The other sequences get the reserved rows as
copies and share all blocks. They sample their first token from the leader's logits, each with its
own noise. From then on, each is an ordinary sequence; the first one to write into the shared last
block copies it.

The members of a preempted group resume one by one, in one plan if the budget allows. They find the
blocks of the prompt in the index, where the first member enters them. So a group is indexed even if
prefix caching is off, under a root that no other request has.

A beam's row samples candidates instead of a token, so its counters include no pending token. It is
not planned until the whole group has its candidates (`BeamSearch.advance`). Then a beam with
children keeps its row for the first child. The other children are forked into rows of beams without
children, whose blocks are freed, or into reserved rows (P fig. 9). The next plan carries the forks
and the tokens.
"""

import numpy as np
import numpy.typing as npt

from quire.base.errors import REQUEST_FAILED
from quire.base.plan import RowFork, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.beams import Beam, BeamSearch
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import NO_ROWS, InFlightStep, PlanBuilder
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int64, Sequence, SequenceGroup
from quire.scheduler.decisions import OutputsBuilder

NOTHING_ALLOWED = Finish(
    "error",
    error=Failure(
        REQUEST_FAILED,
        "the request's grammar and parameters leave its beam search without a token before any"
        " beam has ended; change the grammar, or remove use_beam_search.",
    ),
)


class Branching:
    """Forks of rows: leaders into groups, and beams into their children."""

    def __init__(self, rows: Rows, memory: Memory, lifecycle: Lifecycle) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle

    # ---- groups ------------------------------------------------------------------------------

    def group_of(self, leader: Sequence, num_members: int) -> SequenceGroup:
        """See Forking."""
        params, request = leader.request.params, leader.request
        group = SequenceGroup(num_members, [leader], order=[leader])
        if params.use_beam_search:
            group.search = BeamSearch(
                width=num_members,
                max_output=leader.limit - leader.num_prompt_tokens,
                stop_token_ids=frozenset(request.stop_token_ids),
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
            )
            group.row_params = SamplingParams(
                temperature=0.0, max_tokens=None, logprobs=group.search.num_kept
            )
            # A mask removes forbidden tokens from a beam's candidates, not from a user's logprobs.
            group.row_params.use_beam_search = bool(request.grammar)
        return group

    def fork_leaders(self, samples: Int64, builder: PlanBuilder, now: float) -> tuple[Int64, Int64]:
        """Fork the leaders among the sampling rows. Return the new rows, which sample too, and the
        logits row of each sampling row (empty if each row uses its own). All are int64 [N]."""
        children: list[int] = []
        parents: list[int] = []
        for row in samples.tolist() if self._lifecycle.unforked else ():
            leader = self._rows.table.sequences[row]
            group = leader.group
            if group is not None and group.reserved_rows and not leader.is_beam:
                rows, group.reserved_rows = group.reserved_rows, []
                for child_row in rows:
                    self._fork_member(leader, child_row, builder, now)
                children += rows
                parents += [row] * len(rows)
        if not children:
            return NO_ROWS, NO_ROWS
        self._rows.run(children)
        return np.asarray(children), np.concatenate([samples, np.asarray(parents)])

    def _fork_member(self, leader: Sequence, row: int, builder: PlanBuilder, now: float) -> None:
        """Fork a leader whose prompt is complete with this plan into a reserved row."""
        leader.blocks.advance(leader.num_computed_tokens)
        child = self._lifecycle.branch(leader, row, now)
        self._rows.fork(leader, child)
        self._memory.fork(leader, child)
        builder.add_fork(RowFork(leader.row, row, child.index), leader.blocks)

    # ---- beams -------------------------------------------------------------------------------

    def take_candidates(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder, now: float
    ) -> npt.NDArray[np.bool_]:
        """Take the candidates of beam rows. Return bool [num_sampled]: True for rows that are not
        beams."""
        others = np.ones(len(step.sequences), bool)
        groups: dict[int, SequenceGroup] = {}
        rows, epochs = step.plan.sample_rows.tolist(), step.epochs.tolist()
        for i, (row, epoch, sequence) in enumerate(zip(rows, epochs, step.sequences, strict=True)):
            if not sequence.is_beam:
                continue
            others[i] = False
            candidates = result.candidates.get(row)
            if candidates is not None and self._rows.table.epoch[row] == epoch:
                group = sequence.group
                group.candidates[sequence.index] = candidates
                groups[id(group)] = group
        for group in groups.values():
            if all(member.index in group.candidates for member in group.order):
                self._advance(group, outputs, now)
        return others

    def _advance(self, group: SequenceGroup, outputs: OutputsBuilder, now: float) -> None:
        """Choose among the candidates of all beams, and assign the next beams to rows, or end the
        search."""
        search, order = group.search, group.order
        assert search is not None, "only beams have candidates"
        candidates = [group.candidates[member.index] for member in order]
        group.candidates = {}
        start = order[0].num_prompt_tokens
        alive = search.advance(candidates, [m.known_tokens[start:].tolist() for m in order])
        if alive:
            self._assign_rows(group, alive, now)
            return
        results = group.results
        if results:
            outputs.finish_search(order[0], results)
        else:
            outputs.finish(order[0], NOTHING_ALLOWED)
        reason = results[0].finish_reason if results else NOTHING_ALLOWED.reason
        for member in group.unfinished:
            self._lifecycle.end(member, reason, now)

    def _assign_rows(self, group: SequenceGroup, alive: list[Beam], now: float) -> None:
        order, rows = group.order, self._rows
        for member in order:
            member.blocks.advance(member.num_computed_tokens)
        stays = {beam.parent for beam in reversed(alive)}
        spare = [member for i, member in enumerate(order) if i not in stays]
        for member in spare:
            self._memory.free(member)
        placed: list[Sequence] = []
        taken: set[int] = set()
        for beam in alive:
            parent = order[beam.parent]
            if beam.parent not in taken:
                taken.add(beam.parent)
                placed.append(parent)
                continue
            child = spare.pop(0) if spare else self._new_beam(group, now)
            rows.fork(parent, child)
            self._memory.fork(parent, child)
            child.digests = parent.digests.copy()
            rows.changes.forks.append(RowFork(parent.row, child.row, child.index))
            placed.append(child)
        for member, beam in zip(placed, alive, strict=True):
            rows.put_token(member.row, beam.token_id)
            rows.share(member.row)
        group.order = placed

    def _new_beam(self, group: SequenceGroup, now: float) -> Sequence:
        child = self._lifecycle.branch(group.members[0], group.reserved_rows.pop(0), now)
        self._rows.run([child.row])
        return child
