"""Groups: the sequences of one request, which share its prompt (P 4.4) and are preempted together.

A request for n sequences begins as one, its leader, which holds n rows. The plan that computes the
last token of the prompt forks it: the others take the reserved rows as copies, share all blocks,
and sample their first token from the leader's logits, each from noise of its own. From then on each
is a sequence like any other; whoever first writes into the shared last block copies it.

A group that was preempted comes back member by member, in one plan if the budget lasts. The members
find the blocks of the prompt in the index, where the first one puts them; so a group is indexed
also where prefix caching is off, under a root that no other request has.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.base.events import Admitted
from quire.base.plan import Candidates, RowFork
from quire.base.sampling_params import SamplingParams
from quire.scheduler.beams import BeamSearch, Hypothesis
from quire.scheduler.flight import Draft
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class Group:
    """num_members: how many it has when it is complete. members: the leader first, then by index.

    reserved_rows: for members that are not there yet.
    search, order, candidates: of a beam search: its state, the beams best first, and what the step
    gave them so far, by index. row_params: how its rows sample.
    """

    num_members: int
    members: list[Sequence] = field(default_factory=list)
    reserved_rows: list[int] = field(default_factory=list)
    search: BeamSearch | None = None
    order: list[Sequence] = field(default_factory=list)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    row_params: SamplingParams | None = None

    @classmethod
    def of(cls, leader: Sequence, num_members: int) -> "Group":
        """The group of a request, as long as it has one sequence."""
        params = leader.request.params
        group = cls(num_members, [leader], order=[leader])
        if params.use_beam_search:
            group.search = BeamSearch(
                width=num_members,
                max_output=leader.limit - leader.num_prompt_tokens,
                stop_token_ids=frozenset(leader.request.stop_token_ids),
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
            )
            group.row_params = SamplingParams(
                temperature=0.0, max_tokens=None, logprobs=group.search.num_kept
            )
        return group

    @property
    def is_forked(self) -> bool:
        return len(self.members) == self.num_members

    @property
    def unfinished(self) -> list[Sequence]:
        return [member for member in self.members if member.finish_reason is None]

    @property
    def results(self) -> list[Hypothesis]:
        """Of a beam search, what its client is told: nothing until it is over."""
        if self.search is None or not self.search.is_over:
            return []
        return self.search.hypotheses(self.members[0].request.params.n)

    @property
    def running(self) -> list[Sequence]:
        return [member for member in self.members if member.row >= 0]


def fork_members(scheduler: "Scheduler", leader: Sequence, draft: Draft, now: float) -> list[int]:
    """Fork a leader whose prompt is computed by this plan; the rows of the new members."""
    group = leader.group
    assert group is not None
    table, num_tokens = scheduler.table, leader.num_computed_tokens
    leader.blocks.advance(num_tokens)
    rows, group.reserved_rows = group.reserved_rows, []
    for row in rows:
        child = add_member(scheduler, leader, row, now)
        table.copy_row(leader.row, row)
        child.blocks = scheduler.kv.fork(leader.blocks)
        draft.add_fork(RowFork(leader.row, row, child.index), leader.blocks)
    table.capacity[[leader.row, *rows]] = num_tokens  # the next write must look who shares
    return rows


def add_member(scheduler: "Scheduler", leader: Sequence, row: int, now: float) -> Sequence:
    """A new member on a reserved row, which holds nothing yet."""
    group = leader.group
    assert group is not None
    index = len(group.members)
    child = Sequence(
        request=leader.request,
        arrival=group.members[0].arrival + index,
        arrival_s=leader.arrival_s,
        limit=leader.limit,
        blocks=scheduler.kv.new_sequence(),
        root=leader.root,
        table=scheduler.table,
        row=row,
        digests=leader.digests.copy(),
        num_cached_tokens=leader.num_cached_tokens,
        num_preemptions=leader.num_preemptions,
        num_prompt_logprobs=leader.num_prompt_tokens,  # the leader's are enough
        group=group,
        index=index,
        tenant=leader.tenant,
        due_at=leader.due_at,
        num_prompt_tokens=leader.num_prompt_tokens,
    )
    group.members.append(child)
    scheduler.table.sequences[row] = child
    scheduler.table.arrival[row] = child.arrival
    scheduler.table.priority[row] = child.priority
    scheduler.table.tenant[row] = child.tenant
    request_id = leader.request.request_id
    scheduler.events.append(Admitted(now, request_id, row, child.num_cached_tokens, index))
    return child


def num_told(members: list[Sequence]) -> tuple[int, int]:
    """Output tokens of a request that has ended, and of how many sequences they are."""
    group = members[0].group
    if group is None or group.search is None:
        return sum(member.num_output_tokens for member in members), len(members)
    return sum(len(found.token_ids) for found in group.results), members[0].request.params.n


def give_rows_back(scheduler: "Scheduler", sequence: Sequence) -> None:
    """Free the rows that its group holds for members to come."""
    group = sequence.group
    if group is not None and group.reserved_rows:
        scheduler.free_rows(group.reserved_rows)
        group.reserved_rows = []
        scheduler.num_unforked -= 1


def must_wait_for_prompt(scheduler: "Scheduler", sequence: Sequence) -> bool:
    """Whether a member that comes back would compute what another one is just computing."""
    group = sequence.group
    if group is None or not group.running:
        return False
    size = scheduler.kv.block_size
    shared = sequence.num_prompt_tokens // size * size
    return max(member.num_computed_tokens for member in group.running) < shared
