"""Life of a sequence: its states, their transitions, the waiting queue and the events.

                      +--------- unpark ----------+
                      v                           |
    enter ------> WAITING <--- forget_swapped   PARKED <--- park, park_running
                  |     ^             |
            start |     | preempt   SWAPPED
                  v     |             ^ |
                  RUNNING --preempt---+ | start
                     ^------------------+            end: from every state to ENDED

A branch of a running sequence begins in RUNNING. Only `_move` sets `state`, and it asserts that the
transition is one of `TRANSITIONS`. Only this file writes the queue and the events.
"""

from quire.base.events import Admitted, Event, Finished, Preempted, PrefixFound, Queued
from quire.base.messages import with_priority
from quire.base.plan import RowStart
from quire.base.prefix import PrefixReport
from quire.base.step_outputs import Finish
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.queue import MakePolicy, SchedulerProgress, WaitingQueue
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence, SequenceGroup, State
from quire.scheduler.suspects import Suspects

NEW, WAITING, PARKED = State.NEW, State.WAITING, State.PARKED
RUNNING, SWAPPED, ENDED = State.RUNNING, State.SWAPPED, State.ENDED
TRANSITIONS = frozenset(
    {
        (NEW, WAITING), (NEW, PARKED),  # enter
        (NEW, RUNNING),  # branch
        (WAITING, RUNNING), (SWAPPED, RUNNING),  # start
        (RUNNING, WAITING), (RUNNING, SWAPPED),  # preempt
        (WAITING, PARKED), (SWAPPED, PARKED),  # park
        (RUNNING, PARKED),  # park_running
        (PARKED, WAITING), (PARKED, SWAPPED),  # unpark
        (SWAPPED, WAITING),  # forget_swapped
        (WAITING, ENDED), (PARKED, ENDED), (RUNNING, ENDED), (SWAPPED, ENDED),  # end
    }
)  # fmt: skip


def _move(sequence: Sequence, state: State) -> None:
    """Change the state of a sequence, along one of `TRANSITIONS`."""
    move = sequence.state, state
    assert move in TRANSITIONS, f"{sequence.request.request_id}: {move[0].name} to {state.name}"
    sequence.state = state


class Lifecycle:
    """Owner of the states of sequences, the queue and the events.

    sequences: unfinished requests by id; of a group, its leader. unforked: running groups with
    reserved rows. searches: ids of beam searches. long_stop_lists: sequences with more stop ids
    than a row holds. admitted: sequences whose prefix hit is to be reported. dropped: sequences
    that ended without a step's result, with their finish. ended: sequences that ended since
    `take_ended`.
    """

    def __init__(
        self, rows: Rows, memory: Memory, make_policy: MakePolicy, progress: SchedulerProgress
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.queue = WaitingQueue(make_policy, progress)
        self.events: list[Event] = []
        self.unforked: set[SequenceGroup] = set()
        self.searches: set[str] = set()
        self.long_stop_lists: set[Sequence] = set()
        self.admitted: list[Sequence] = []
        self.dropped: list[tuple[Sequence, Finish]] = []
        self.ended: list[Sequence] = []
        self.suspects = Suspects()
        self._rows, self._memory = rows, memory

    # ---- transitions -------------------------------------------------------------------------

    def enter(self, sequence: Sequence, is_parked: bool, now: float) -> None:
        """Queue a new sequence, or park it."""
        request = sequence.request
        self.sequences[request.request_id] = sequence
        if request.params.use_beam_search:
            self.searches.add(request.request_id)
        if sequence.has_long_stop_list:
            self.long_stop_lists.add(sequence)
        sequence.tenant = self.queue.tenants.enter(request.tenant)
        _move(sequence, PARKED if is_parked else WAITING)
        if not is_parked:
            self.queue.push(sequence)
        self.events.append(
            Queued(
                now,
                request.request_id,
                sequence.num_prompt_tokens,
                request.params.max_tokens,
                request.received_s,
                request.tenant,
                bool(request.grammar),
            )
        )

    def start(self, sequence: Sequence, num_computed: int, now: float) -> RowStart:
        """Give a queued sequence a row. Return the row's start for the plan."""
        self.queue.remove(sequence)
        started = self._rows.start(sequence, num_computed, self._memory.names.is_indexed(sequence))
        _move(sequence, RUNNING)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num_computed
        if sequence.group is not None and not sequence.group.is_forked:
            self.unforked.add(sequence.group)
        self.events.append(
            Admitted(now, sequence.request.request_id, sequence.row, num_computed, sequence.index)
        )
        return started

    def branch(self, leader: Sequence, row: int, now: float) -> Sequence:
        """Return a new member of a running group on one of its reserved rows. It has no blocks
        yet."""
        group = leader.group
        assert group is not None, "only a group has members to come"
        child = Sequence(
            request=leader.request,
            arrival=group.members[0].arrival + len(group.members),
            arrival_s=leader.arrival_s,
            limit=leader.limit,
            blocks=self._memory.new_sequence(),
            root=leader.root,
            table=leader.table,
            row=row,
            digests=leader.digests.copy(),
            num_cached_tokens=leader.num_cached_tokens,
            num_preemptions=leader.num_preemptions,
            num_prompt_logprobs=leader.num_prompt_tokens,  # the leader reports them
            group=group,
            index=len(group.members),
            tenant=leader.tenant,
            due_at=leader.due_at,
            keep_s=leader.keep_s,
            is_renamed=leader.is_renamed,
            reads_cache=leader.reads_cache,
            watchers=leader.watchers,
            num_prompt_tokens=leader.num_prompt_tokens,
        )
        _move(child, RUNNING)
        self._rows.hand_to(child)
        group.members.append(child)
        if child.has_long_stop_list:
            self.long_stop_lists.add(child)
        if not group.reserved_rows:
            self.unforked.discard(group)
        request_id = leader.request.request_id
        self.events.append(Admitted(now, request_id, row, child.num_cached_tokens, child.index))
        return child

    def preempt(
        self, victim: Sequence, for_request_id: str, now: float, is_swapped: bool = False
    ) -> set[int]:
        """Preempt a running sequence and its group: release their rows and blocks, and queue them
        before all new ones. Return the rows. is_swapped: the blocks were copied to host memory."""
        members = [member for member in victim.members if member.row >= 0]
        rows, num_lost = self._take_rows(members, is_swapped)
        for member in members:
            member.num_preemptions += 1
            _move(member, SWAPPED if is_swapped else WAITING)
            self.queue.requeue(member)
        if victim.group is not None:
            self._end_branching(victim.group)
        self._report_preempted(victim, for_request_id, num_lost, is_swapped, now)
        return rows

    def park(self, sequence: Sequence) -> None:
        """Move a sequence from the queue to the parked ones, until it can be computed."""
        self.queue.remove(sequence)
        _move(sequence, PARKED)

    def park_running(self, sequence: Sequence, for_request_id: str, now: float) -> None:
        """Park a running sequence that waits for more of its prompt, and release its row and
        blocks. This does not count as a preemption, since it had no tokens to compute."""
        _, num_lost = self._take_rows([sequence], is_swapped=False)
        _move(sequence, PARKED)
        self._report_preempted(sequence, for_request_id, num_lost, False, now)

    def unpark(self, sequence: Sequence) -> None:
        """Queue a parked sequence, unless it has blockers."""
        if sequence.blockers:
            return
        _move(sequence, WAITING if sequence.host_blocks is None else SWAPPED)
        if sequence.num_preemptions:
            self.queue.requeue(sequence)
        else:
            self.queue.push(sequence)

    def set_priority(self, sequence: Sequence, priority: int) -> None:
        """Change the priority of a request, in the queue and among the running rows."""
        members, queue = sequence.members, self.queue
        queued = [each for each in members if each.state in (WAITING, SWAPPED)]
        adding = [queue.requeue if queue.is_preempted(each) else queue.push for each in queued]
        for each in queued:
            queue.remove(each)
        request = with_priority(sequence.request, priority)
        for each in members:
            each.request = request
        for each, add in zip(queued, adding, strict=True):
            add(each)
        self._rows.set_priority([each.row for each in members if each.row >= 0], priority)

    def forget_swapped(self, sequence: Sequence) -> None:
        """Drop a sequence's host blocks, whose contents may be wrong. It must be recomputed."""
        self._memory.free_swapped(sequence)
        if sequence.state is SWAPPED:
            _move(sequence, WAITING)

    def end(self, sequence: Sequence, reason: str, now: float) -> None:
        """End a sequence. A request ends with its last sequence. reason: as in `Finish`."""
        for watcher in sequence.watchers:
            watcher.leave(sequence, reason, now)
        if sequence.state is RUNNING:
            self._rows.release(sequence)
            self._memory.free(sequence)
        elif sequence.state is not PARKED:
            self.queue.remove(sequence)
        if sequence.group is not None:
            self._end_branching(sequence.group)
        self._memory.free_swapped(sequence)
        _move(sequence, ENDED)
        sequence.finish_reason = reason
        self.long_stop_lists.discard(sequence)
        if self.suspects.until:
            self.suspects.drop(sequence)
        self.ended.append(sequence)
        self._memory.headroom.take_end()
        if sequence.group is None or not sequence.group.unfinished:
            self._end_request(sequence, reason, now)

    def drop(self, sequence: Sequence, finish: Finish, now: float) -> None:
        """End a sequence without a step's result. The next outputs report its finish."""
        self.dropped.append((sequence, finish))
        self.end(sequence, finish.reason, now)

    # ---- reports -----------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def take_admitted(self) -> list[Sequence]:
        """Return the sequences whose prefix hit is to be reported, and clear the list."""
        admitted, self.admitted = self.admitted, []
        return admitted

    def take_dropped(self) -> list[tuple[Sequence, Finish]]:
        """Return the dropped sequences since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def take_ended(self) -> list[Sequence]:
        """Return the sequences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def report_prefix(
        self, sequence: Sequence, report: PrefixReport, is_hit: bool, now: float
    ) -> None:
        """Record the prefix report of a newly admitted request."""
        sequence.report = report
        if (is_hit or report.miss) and not sequence.is_beam:  # a beam search reports it at its end
            self.admitted.append(sequence)
        self.events.append(PrefixFound(now, sequence.request.request_id, report))

    def add_event(self, event: Event, is_first: bool = False) -> None:
        """Add an event. is_first: before all other events of this call."""
        self.events.insert(0 if is_first else len(self.events), event)

    def _take_rows(self, members: list[Sequence], is_swapped: bool) -> tuple[set[int], int]:
        """Release the rows and blocks of running sequences. Return the rows, and the number of
        computed tokens lost."""
        rows, num_lost = set(), 0
        for member in members:
            rows.add(member.row)
            if is_swapped:
                member.num_swapped_tokens = member.num_kept_tokens
            else:
                num_lost += member.num_computed_tokens
            self._rows.release(member)
            self._memory.free(member)
        return rows, num_lost

    def _end_branching(self, group: SequenceGroup) -> None:
        """Free the reserved rows of a group."""
        if group.reserved_rows:
            self._rows.give_back(group.reserved_rows)
            group.reserved_rows = []
            self.unforked.discard(group)

    def _report_preempted(
        self, victim: Sequence, for_request_id: str, num_lost: int, is_swapped: bool, now: float
    ) -> None:
        if victim.group is not None:
            victim.group.candidates = {}
        request_id = victim.request.request_id
        self.events.append(Preempted(now, request_id, for_request_id, num_lost, is_swapped))

    def _end_request(self, sequence: Sequence, reason: str, now: float) -> None:
        request, group = sequence.request, sequence.group
        request_id, is_search = request.request_id, request.params.use_beam_search
        del self.sequences[request_id]
        self.queue.tenants.leave(request.tenant)
        self.searches.discard(request_id)
        if group is None:
            num_tokens, num_results = sequence.num_output_tokens, 1
        elif group.search is None:
            num_tokens = sum(member.num_output_tokens for member in group.members)
            num_results = len(group.members)
        else:
            num_tokens = sum(len(found.token_ids) for found in group.results)
            num_results = len(group.results) or request.params.n
        self.events.append(Finished(now, request_id, reason, num_tokens, num_results, is_search))
