"""Planning: grants tokens to running rows, admits waiting sequences, and marks the rows that
sample.

Running rows come first, by priority and arrival, then waiting sequences (admission.py). If a row
lacks a block, the latest arrival of the lowest priority is preempted (P 4.5). Such a plan admits no
sequence. Blocks are allocated, and full blocks of known tokens are named, when the plan is made. So
later requests of the same plan hit them (T algorithm 2, inner loop).
"""

from collections import deque

import numpy as np

from quire.base.events import Planned
from quire.base.plan import NO_INTS, Move, MoveKind, Plan
from quire.scheduler.core.admission import Admission
from quire.scheduler.core.extension import DraftTokens, Forking
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import NO_ROWS, Decoding, InFlightStep, PlanBuilder
from quire.scheduler.core.preemption import Preemption
from quire.scheduler.core.queue import SchedulerProgress
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int64, State
from quire.scheduler.sharing import share_budget

PROMPT_TOKENS = 16  # minimum room for prompt tokens in each step


class Planner:
    """Owner of the plans in flight, oldest first, which makes the next plan."""

    _last: Decoding | None = None  # the last plan, if the next one may repeat it

    def __init__(
        self,
        rows: Rows,
        memory: Memory,
        lifecycle: Lifecycle,
        progress: SchedulerProgress,
        branching: Forking,
        preemption: Preemption,
        admission: Admission,
        drafts: DraftTokens,
    ) -> None:
        self.in_flight: deque[InFlightStep] = deque()
        self.next_step_id = 0
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._progress, self._branching = progress, branching
        self._preemption, self._admission, self._drafts = preemption, admission, drafts
        self._token_budget = admission.token_budget  # upper limit; step_tokens may be lower
        self._swaps: list[Move] = []  # swaps out that await the next plan

    def plan(self, now: float) -> Plan | None:
        """Return the next plan, or None if no sequence can compute anything now."""
        last, self._last = self._last, None
        if last is not None and (plan := self._repeat(last, now)) is not None:
            return plan
        builder, self._swaps = PlanBuilder(self.next_step_id, swaps=self._swaps), []
        suspects = self._lifecycle.suspects.until
        if suspects and self._plan_suspect(builder, now):
            return self._close(builder, 0, now)
        rows = self._rows.running
        if suspects:
            rows = rows[[sequence not in suspects for sequence in self._rows.sequences()]]
        needs = self._rows.take_turns(self._rows.needs(rows))
        max_tokens = self._step_budget(needs)
        budget = max_tokens - self._serve_running(builder, rows, needs, max_tokens, now)
        # If no tokens were planned, only the preempted rows had something to compute.
        if not builder.has_preempted or budget == max_tokens:
            self._admission.admit(builder, budget, now)
        return self._close(builder, max_tokens, now)

    def flush(self, now: float) -> Plan | None:
        """Return a plan that only copies evictable cached blocks to host memory, as many as fit.
        Return None if there are none."""
        tier = self._memory.kv.tier
        while tier is not None and tier.evict_some():
            builder = PlanBuilder(self.next_step_id)
            builder.add_moves(MoveKind.SWAP_OUT, self._memory.copies_out())
            self._memory.end_plan(builder.step_id, now)
            if moves := builder.moves():  # otherwise host memory already had these blocks
                plan = Plan(builder.step_id, moves=moves)
                self._put_in_flight(InFlightStep.of(plan, self._rows.table, []), 0, now)
                return plan
        return None

    def offload(self, now: float) -> Plan | None:
        """Return a plan that only copies the blocks that listeners add to host memory, or None if
        there are none."""
        tier = self._memory.kv.tier
        builder, self._swaps = PlanBuilder(self.next_step_id, swaps=self._swaps), []
        builder.add_moves(MoveKind.SWAP_OUT, self._memory.copies_out())
        if tier is None or not (builder.swaps or tier.has_held):
            return None
        self._memory.end_plan(builder.step_id, now)
        plan = Plan(builder.step_id, moves=builder.moves())
        self._put_in_flight(InFlightStep.of(plan, self._rows.table, []), 0, now)
        return plan

    def _step_budget(self, needs: Int64) -> int:
        """Return the token budget of the next plan: the measured `step_tokens`, if known. It always
        has room for all decoding rows and PROMPT_TOKENS more. needs: int64 [num_running]."""
        step_tokens = self._memory.rates.step_tokens
        if not step_tokens:
            return self._token_budget
        num_decoding = int(np.count_nonzero(needs == 1))
        min_budget = num_decoding + max(PROMPT_TOKENS, self._memory.chunk_limit.min_tokens)
        return min(self._token_budget, max(step_tokens, min_budget))

    def _plan_suspect(self, builder: PlanBuilder, now: float) -> bool:
        """Plan the first suspect that can compute something, alone. Return whether there is one."""
        for sequence in list(self._lifecycle.suspects.until):
            if sequence.row >= 0:
                rows = np.array([sequence.row])
                need = self._rows.needs(rows)
                max_tokens = self._step_budget(need)
                used = self._serve_running(
                    builder, rows, np.minimum(need, max_tokens), max_tokens, now
                )
            elif sequence.state is State.PARKED:
                continue
            else:
                used = self._admission.bring_in(sequence, builder, self._token_budget, now) or 0
            if used:
                return True
        return False

    def _serve_running(
        self, builder: PlanBuilder, rows: Int64, need: Int64, budget: int, now: float
    ) -> int:
        """Grant tokens to running rows. Return the number of tokens. rows, need: int64 [N], rows
        and the tokens that they could compute."""
        table = self._rows.table
        if len(rows) == 0:
            return 0
        limited = self._memory.chunk_limit.limited
        need = self._within_limits(rows, need, builder) if limited else need
        if int(need.sum()) > budget:
            queue, fits = self._lifecycle.queue, self._admission.fits_now
            need, builder.deferred = share_budget(self._rows, queue, rows, need, budget, fits)
            need = self._within_limits(rows, need, builder) if limited else need
        target = table.computed[rows] + need
        [short] = (target > table.capacity[rows]).nonzero()
        takes_one = len(short) > 0 and need[short].max() == 1
        if not (takes_one and self._append_blocks(rows[short], target[short], builder)):
            for i in short:
                sequence = table.sequences[rows[i]]
                if sequence is None:  # preempted by an earlier row of this loop
                    continue
                if not self._preemption.ensure_capacity(sequence, int(target[i]), builder, now):
                    need[i], target[i] = 0, table.computed[rows[i]]
        if builder.has_preempted:
            alive = np.isin(rows, self._rows.running)
            rows, need, target = rows[alive], need[alive], target[alive]
            builder.deferred = [prompt for prompt in builder.deferred if prompt.row >= 0]
        [busy] = need.nonzero()
        if len(busy) < len(rows):
            rows, need, target = rows[busy], need[busy], target[busy]
        if limited:
            self._grant(rows, need, builder)
        builder.add_rows(rows, need)
        self._advance(builder, rows, target)
        return int(need.sum())

    def _advance(self, builder: PlanBuilder, rows: Int64, target: Int64) -> None:
        """Let rows compute up to `target` tokens, and name the blocks that become full. rows,
        target: int64 [N]."""
        table = self._rows.table
        self._rows.advance(rows, target)
        num_ready = np.minimum(target, table.known[rows])
        [full] = (num_ready >= table.index_at[rows]).nonzero()
        if len(full):
            self._admission.name_full_blocks(rows[full], num_ready[full], builder)

    def _within_limits(self, rows: Int64, need: Int64, builder: PlanBuilder) -> Int64:
        """Return the needs, int64 [N], reduced to the limits of `chunk_limit`."""
        memory, table, need = self._memory, self._rows.table, need.copy()
        limited = np.isin(rows, [sequence.row for sequence in memory.chunk_limit.limited])
        for i in np.flatnonzero(limited & (need > 0)).tolist():
            first = int(table.computed[rows[i]])
            need[i] = memory.limit_chunk(table.sequences[rows[i]], first, int(need[i]), builder)
        return need

    def _grant(self, rows: Int64, need: Int64, builder: PlanBuilder) -> None:
        """Add to the plan what the next tokens of limited rows need in addition to blocks."""
        memory, table = self._memory, self._rows.table
        limited = np.isin(rows, [sequence.row for sequence in memory.chunk_limit.limited])
        for row, num in zip(rows[limited].tolist(), need[limited].tolist(), strict=True):
            memory.grant_chunk(table.sequences[row], int(table.computed[row]), num, builder)

    def _append_blocks(self, rows: Int64, target: Int64, builder: PlanBuilder) -> bool:
        """Allocate one new block for each of these rows, and return True. Return False, and do
        nothing, unless the blocks of all rows are full, so that no shared block is written, and no
        preemption is necessary. rows, target: int64 [N], target is the length after this plan.

        In steady decode, a sixteenth of the rows need a block in each step. One call per row would
        take most of the step's time.
        """
        size, blocks = self._memory.block_size, [s.blocks for s in self._rows.sequences(rows)]
        lengths = target.tolist()
        found = self._memory.kv.append_blocks(blocks, lengths)
        if found is None:
            return False
        writes = zip(rows.tolist(), lengths, found, strict=True)
        builder.writes += [(0, row, (length - 1) // size, block) for row, length, block in writes]
        self._rows.set_capacity(rows, target + (size - 1))
        return True

    def _close(self, builder: PlanBuilder, max_tokens: int, now: float) -> Plan | None:
        """Freeze the plan and put it in flight; return it, or None if it is empty. Rows that
        compute their last known or pending token sample. max_tokens: token budget of the step."""
        table = self._rows.table
        rows, num_tokens = builder.all_rows()
        if self._drafts.drafted and not builder.has_preempted:  # drafts may evict blocks
            self._drafts.spread(builder, rows, num_tokens, max_tokens - int(num_tokens.sum()))
        builder.add_moves(MoveKind.SWAP_OUT, self._memory.copies_out())
        if len(rows) == 0:
            self._swaps = builder.swaps  # only preempted rows had something to compute
            self._memory.end_turn(now)
            return None
        self._memory.end_plan(builder.step_id, now)
        computed = table.computed[rows]
        is_sampling = (computed == table.total[rows]) & table.samples[rows]
        samples = rows[is_sampling]
        forked = sources = NO_ROWS
        if self._lifecycle.unforked:
            forked, sources = self._branching.fork_leaders(samples, builder, now)
            samples = np.concatenate([samples, forked])
        self._rows.expect_tokens(self._without_beams(samples))
        charges = np.bincount(table.tenant[rows], num_tokens + is_sampling).astype(np.int64)
        self._lifecycle.queue.tenants.charge(charges)
        changes, plan_rows = self._rows.take_changes(), rows.astype(np.int32)
        all_sample = len(samples) == len(rows) and not len(forked)
        plan = Plan(
            step_id=builder.step_id,
            rows=plan_rows,
            num_tokens=num_tokens.astype(np.int32),
            computed_bound=(computed - num_tokens).astype(np.int32),
            sample_rows=plan_rows if all_sample else samples.astype(np.int32),
            num_candidates=table.num_candidates[samples],
            sources=sources.astype(np.int32),
            masked_rows=samples[table.is_masked[samples]].astype(np.int32),
            forked=(*changes.forks, *builder.forked),
            host_tokens=tuple(changes.host_tokens),
            started=tuple(builder.started),
            released=np.asarray(changes.released, np.int32),
            block_writes=builder.block_writes(),
            moves=builder.moves(),
            drafts=tuple(builder.drafts),
            is_guessing=builder.is_guessing,
            **builder.extras,
        )
        if self._rows.num_stages > 1:
            last_ids = self._rows.last_ids(rows, plan.last_positions)
            plan = plan.replace(last_ids=last_ids)
        step, num_planned = InFlightStep.of(plan, table, builder.shared), int(num_tokens.sum())
        self._put_in_flight(step, num_planned, now)
        all_decode = all_sample and num_planned == len(rows) and rows is self._rows.running
        has_changes = plan.forked or plan.host_tokens or builder.extras
        is_plain = not has_changes and not self._lifecycle.searches and self._rows.num_stages == 1
        if all_decode and is_plain:
            num_left = int((table.limit[rows] - table.total[rows]).min())
            self._last = Decoding(step, rows, num_tokens, charges, num_left)
        return plan

    def _repeat(self, last: Decoding, now: float) -> Plan | None:
        """Return the plan in which the rows of the last plan decode again. Return None if anything
        else may have to be planned."""
        rows, memory, lifecycle = last.rows, self._memory, self._lifecycle
        if rows is not self._rows.running or not last.num_left:
            return None
        if len(lifecycle.queue) and self._rows.num_free:
            return None
        if self._drafts.drafted or memory.chunk_limit.limited or lifecycle.suspects.until:
            return None
        if self._rows.changes.forks or self._rows.changes.host_tokens:
            return None
        table, builder = self._rows.table, PlanBuilder(self.next_step_id)
        computed = table.computed[rows]
        target = computed + last.ones
        [short] = (target > table.capacity[rows]).nonzero()
        if len(short) and not self._append_blocks(rows[short], target[short], builder):
            return None
        self._advance(builder, rows, target)
        if len(lifecycle.queue):  # nothing can be admitted, but the policy looks at its head
            self._admission.admit(builder, self._step_budget(last.ones) - len(rows), now)
        builder.add_moves(MoveKind.SWAP_OUT, memory.copies_out())
        memory.end_plan(builder.step_id, now)
        self._rows.expect_tokens(rows)
        lifecycle.queue.tenants.charge(last.charges)
        was = last.step
        plan = was.plan.replace(
            step_id=builder.step_id,
            computed_bound=computed.astype(np.int32),
            released=NO_INTS,
            block_writes=builder.block_writes(),
            moves=builder.moves(),
        )
        epochs, sequences = was.epochs, was.sequences
        step = InFlightStep(plan, epochs, sequences, epochs, sequences, builder.shared)
        self._put_in_flight(step, len(rows), now)
        last.num_left -= 1
        self._last = last
        return plan

    def _put_in_flight(self, step: InFlightStep, num_tokens: int, now: float) -> None:
        """Record a plan. num_tokens: its tokens; 0 if it only moves blocks."""
        self.next_step_id += 1
        self.in_flight.append(step)
        if num_tokens:
            self._progress.num_planned_tokens += num_tokens
            plan, num_rows = step.plan, len(step.plan.rows)
            self._lifecycle.add_event(Planned(now, plan.step_id, num_rows, num_tokens, plan))

    def _without_beams(self, rows: Int64) -> Int64:
        """Return the rows that sample a token. Beams produce candidates instead."""
        if not self._lifecycle.searches:
            return rows
        return rows[[not sequence.is_beam for sequence in self._rows.table.sequences[rows]]]
