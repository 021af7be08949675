"""The unified scheduler: continuous batching on two counters with a token budget (T 4.4, 4.5.1).

Four doors: `add`, `control`, `schedule`, `update`. Nothing else changes its state; it reads no
clock and makes no I/O, so the list of calls is the run.

A plan first serves the rows that run, by priority and then by arrival, then admits waiting
sequences (admission.py). A row that needs a block that is not there preempts the latest arrival of
the lowest priority (P 4.5), all or nothing, by recomputation or by swapping; in such a step nobody
is admitted. Blocks are allocated, and full blocks of known tokens enter the index, when the plan is
made: later requests of the same plan hit them (T algorithm 2, inner loop). `depth` plans may be in
flight; no other code knows how many.
"""

from collections import deque
from functools import partial

import numpy as np

from quire.base.config import SchedulerConfig
from quire.base.errors import RequestError
from quire.base.events import Admitted, Event, Finished, Planned, PrefixFound, Queued
from quire.base.messages import Append, Control, MeasuredRates, Request, ResetPrefixCache, Unpin
from quire.base.plan import HostTokens, Move, Plan, RowFork, RowStart, StepResult
from quire.base.step_outputs import Finish, StepOutputs
from quire.base.tiers import Answer
from quire.base.validation import check_open, check_pin
from quire.kv.digest import root_digest
from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.admission import Headroom, admit, fits_now
from quire.scheduler.beam_rows import is_beam
from quire.scheduler.budget import share_budget
from quire.scheduler.crossing import Digester, append_blocks, digest_blocks, index_rows
from quire.scheduler.fifo import Fifo
from quire.scheduler.flight import Blocks, Draft, Flight
from quire.scheduler.groups import Group, fork_members, give_rows_back, num_told
from quire.scheduler.history import History
from quire.scheduler.hits import remaining
from quire.scheduler.invariants import check_invariants
from quire.scheduler.outputs import OutputsBuilder
from quire.scheduler.pins import Pins
from quire.scheduler.policy import MakePolicy
from quire.scheduler.preemption import grow
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.reset import reset_cache
from quire.scheduler.results import take_result
from quire.scheduler.sequence import NEVER, NUM_STOP_IDS, Int32, Int64, RowTable, Sequence
from quire.scheduler.stores import Stores
from quire.scheduler.streaming import append, has_something_to_compute
from quire.scheduler.swap import forget
from quire.scheduler.tiers import flush, offload
from quire.scheduler.time_limits import TimeLimits

PROMPT_TOKENS = 16  # at least, of prompts, in a step that has time for few tokens


class Scheduler:
    """Decides who computes how many tokens in each step, and which blocks they use.

    max_num_seqs rows, max_num_batched_tokens per plan, sequences up to max_model_len tokens.
    fingerprint: identifies the contents of the cache (kv/digest.py).
    """

    def __init__(
        self,
        kv: KVManager,
        config: SchedulerConfig,
        max_model_len: int,
        watermark: float = 0.01,
        fingerprint: bytes = b"",
        make_policy: MakePolicy = Fifo,
        num_stores: int = 0,
    ) -> None:
        assert config.max_num_seqs and config.max_num_batched_tokens, "derive these two first"
        self.kv = kv
        self.depth = config.pipeline_depth or 1
        self.token_budget = config.max_num_batched_tokens  # the most; a step may have time for less
        self.max_model_len = max_model_len
        num_blocks = min(pool.num_blocks for pool in kv.pools)
        self.headroom = Headroom(num_blocks, int(watermark * num_blocks))
        self.fingerprint = fingerprint
        self.queue = WaitingQueue(make_policy, self)
        self.table = RowTable(config.max_num_seqs, max_model_len)
        self.flights: deque[Flight] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.events: list[Event] = []
        self._running = np.empty(0, np.int64)  # rows in order of priority, then arrival
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._swaps: list[Move] = []  # out of the device's memory, for the next plan
        self._num_arrivals = 0
        self.num_long_stop_lists = 0
        self.num_unforked = 0  # groups that run and hold rows for members to come
        self.num_beam_searches = 0
        self.preemption_mode = config.preemption_mode
        self.rates = MeasuredRates()
        self._admitted: list[Sequence] = []  # whose clients were not told yet of their prefix
        self.forked: list[RowFork] = []  # by beam searches, for the next plan; also host_tokens
        self.host_tokens: list[HostTokens] = []
        self._next_step_id = 0
        self.num_planned_tokens = 0
        self.long_prefill_threshold = config.long_prefill_token_threshold
        self.time_limits = TimeLimits()
        self.late: list[tuple[Sequence, Finish]] = []  # dropped since the last outputs
        self.pins = Pins(self)
        self.history = History(self)
        self.stores = Stores(self, num_stores) if num_stores else None
        self.digester: Digester = digest_blocks  # a replay has them from its record

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or bool(self.flights) or bool(self.late)

    @property
    def last_running(self) -> Sequence:
        """Who gives way first."""
        found: Sequence = self.table.sequences[self._running[-1]]
        return found

    def running(self) -> list[Sequence]:
        """Sequences that hold a row, in order of priority, then arrival."""
        return self.running_at(self._running)

    def running_at(self, rows: Int64) -> list[Sequence]:
        found: list[Sequence] = self.table.sequences[rows].tolist()
        return found

    # ---- door 1: add -------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Sequence:
        """Queue a request. Raises RequestError if this engine can never serve it."""
        self.pins.drop_late(now)
        if request.request_id in self.sequences or request.request_id in self.pins.by_id:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; between 1 and max_model_len - 1 ="
                f" {self.max_model_len - 1} are possible. Shorten it or raise max_model_len."
            )
        num, most_output = request.params.num_samples, request.params.max_tokens
        if num > self.table.num_rows:
            raise RequestError(
                f"{num} sequences at once are more than max_num_seqs={self.table.num_rows}; ask for"
                " fewer (n, best_of) or raise max_num_seqs."
            )
        sequence = self._new_sequence(request, now)
        if request.pin_s is not None:
            check_pin(request)
            self.pins.check(request)
        elif request.is_open:
            check_open(request.params)
        elif not self.pins.fits_alone(sequence, sequence.limit, num):
            raise RequestError(
                f"{num_prompt} prompt tokens and {num} x {most_output or self.max_model_len} output"
                " tokens need more KV blocks than the pool has beside what is pinned. Lower"
                " max_tokens or enlarge kv_cache_memory_bytes."
            )
        self._enter(sequence, now)
        if request.pin_s is not None:
            self.pins.begin(sequence, now)
        return sequence

    def _new_sequence(self, request: Request, now: float) -> Sequence:
        num, num_prompt = request.params.num_samples, len(request.prompt_token_ids)
        limit = self.max_model_len
        if not request.is_open:
            limit = self.limit_of(num_prompt, request.params.max_tokens)
        sequence = Sequence(
            request=request,
            arrival=self._num_arrivals,
            arrival_s=now,
            limit=limit,
            blocks=self.kv.new_sequence(),
            root=self.root(request, num, self._num_arrivals),
            table=self.table,
            saved_tokens=np.asarray(request.prompt_token_ids, np.int32),
            num_prompt_tokens=num_prompt,
            is_open=request.is_open,
        )
        if num > 1 or request.params.use_beam_search:
            sequence.group = Group.of(sequence, num)
        return sequence

    def _enter(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence, or let it wait aside for what it needs first."""
        request = sequence.request
        self.num_beam_searches += request.params.use_beam_search
        self._num_arrivals += request.params.num_samples
        self.num_long_stop_lists += _has_long_stop_list(request)
        self.sequences[request.request_id] = sequence
        sequence.tenant = self.queue.tenants.enter(request.tenant)
        sequence.is_aside = not has_something_to_compute(sequence)
        if self.stores is not None and not sequence.is_aside:
            sequence.is_aside = self.stores.begin(sequence)
        if not sequence.is_aside:
            self.queue.push(sequence)
        self.time_limits.add(sequence)
        self.events.append(
            Queued(
                now,
                request.request_id,
                sequence.num_prompt_tokens,
                request.params.max_tokens,
                request.received_s,
                request.tenant,
            )  # fmt: skip
        )

    def enter_again(self, request: Request, now: float) -> Sequence:
        """Queue a request that has ended once more."""
        sequence = self._new_sequence(request, now)
        self._enter(sequence, now)
        return sequence

    def limit_of(self, num_prompt: int, max_tokens: int | None) -> int:
        """Tokens at which a sequence ends."""
        return min(num_prompt + (max_tokens or self.max_model_len), self.max_model_len)

    def root(self, request: Request, num: int, arrival: int) -> bytes:
        """Where the digests of a request begin. Without prefix caching the sequences of a group
        still share the prompt, with nobody else."""
        salt = request.cache_salt
        if num > 1 and not self.kv.enable_prefix_caching:
            salt = f"{salt} of group {arrival} alone"
        return root_digest(self.fingerprint, salt, request.adapter_id, request.media_ids)

    # ---- door 2: control ---------------------------------------------------------------------

    def control(self, message: Control, now: float) -> None:
        """Carry out a control message. Unknown request ids have ended by themselves."""
        if isinstance(message, ResetPrefixCache):
            reset_cache(self, message.epoch, now)
            return
        if isinstance(message, Append):
            append(self, message, now)
            return
        if isinstance(message, MeasuredRates):
            self.rates = message
            return
        if isinstance(message, Answer):
            if self.stores is not None:
                self.stores.take(message)
            return
        if isinstance(message, Unpin):
            self.pins.remove(message.request_id, message.tenant, now)
            return
        sequence = self.sequences.get(message.request_id)
        if sequence is None:
            return
        for member in self.members(sequence):
            if message.index in (-1, member.index) and member.finish_reason is None:
                self.finish(member, message.finish_reason, now)

    def members(self, sequence: Sequence) -> list[Sequence]:
        """The sequences of its request, also those that have ended."""
        return [sequence] if sequence.group is None else list(sequence.group.members)

    # ---- door 3: schedule --------------------------------------------------------------------

    def schedule(self, now: float) -> Plan | None:
        """The next plan, or None if nothing can be planned before a result comes in."""
        if len(self.flights) >= self.depth:
            return None
        self.time_limits.drop_late(self, now)
        self.pins.drop_late(now)
        draft, self._swaps = Draft(self._next_step_id, swaps=self._swaps), []
        most = self._step_budget()
        budget = most - self._serve_running(draft, most, now)
        # If nothing is planned, those who gave way were the only ones with something to do.
        if not draft.has_preempted or budget == most:
            admit(self, draft, budget, now)
        return self._close(draft, now)

    def _step_budget(self) -> int:
        """Tokens of the next plan: what a step has time for, but always all that decode and a few
        of a prompt."""
        if not self.rates.step_tokens:
            return self.token_budget
        num_decoding = int(np.count_nonzero(self._needs(self._running) == 1))
        return min(self.token_budget, max(self.rates.step_tokens, num_decoding + PROMPT_TOKENS))

    def _serve_running(self, draft: Draft, budget: int, now: float) -> int:
        """Grant tokens to the rows that run; returns how many."""
        rows, table = self._running, self.table
        if len(rows) == 0:
            return 0
        need = self._needs(rows)
        if need.sum() > budget:
            need, draft.deferred = share_budget(self, rows, need, budget, partial(fits_now, self))
        target = table.computed[rows] + need
        short = np.flatnonzero(target > table.capacity[rows])
        if len(short) and not append_blocks(self, rows[short], target[short], draft):
            for i in short:
                if i >= len(self._running):
                    break  # preempted meanwhile, with all that came after it
                grow(self, self.table.sequences[rows[i]], int(target[i]), draft, now)
        alive = len(self._running)
        rows, need, target = rows[:alive], need[:alive], target[:alive]
        if not need.all():
            busy = np.flatnonzero(need)
            rows, need, target = rows[busy], need[busy], target[busy]
        table.computed[rows] = target
        draft.add_rows(rows, need)
        full = rows[np.minimum(target, table.known[rows]) >= table.index_at[rows]]
        if len(full):
            index_rows(self, full, draft)
        return int(need.sum())

    def _needs(self, rows: Int64) -> Int64:
        """Tokens that rows could compute now."""
        table = self.table
        most = np.minimum(table.total[rows] - table.num_open[rows], table.limit[rows] - 1)
        need: Int64 = np.minimum(most - table.computed[rows], self.long_prefill_threshold or NEVER)
        return need

    def rows_that_wait(self) -> Int64:
        """Rows of open prompts of which all that may be is computed."""
        rows = self._running[self.table.num_open[self._running] > 0]
        waiting: Int64 = rows[self._needs(rows) == 0]
        return waiting

    def need_of(self, sequence: Sequence) -> int:
        return int(self._needs(np.array([sequence.row]))[0])

    def num_tokens_under_way(self) -> int:
        return int(self._needs(self._running).sum())

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence lacks until it samples; prefix hits left out, as of now."""
        return remaining(self, sequence)

    def grant(self, sequence: Sequence, num_new: int, draft: Draft, hit: Blocks = ()) -> None:
        """Plan the next tokens of a row that has room for them. hit: blocks that it begins with."""
        self.table.computed[sequence.row] += num_new
        draft.add_rows(np.array([sequence.row]), np.array([num_new]))
        if self.is_indexed(sequence):
            index_rows(self, np.array([sequence.row]), draft, hit)

    def is_indexed(self, sequence: Sequence) -> bool:
        return self.kv.enable_prefix_caching or sequence.group is not None

    def _close(self, draft: Draft, now: float) -> Plan | None:
        """Freeze the draft; rows whose last known or pending token is computed will sample."""
        table = self.table
        rows, num_tokens = draft.all_rows()
        self.history.take_evicted(now)
        offload(self, draft, is_planned=len(rows) > 0)
        if len(rows) == 0:
            self._swaps = draft.swaps  # who gave way was the only one with something to do
            return None
        is_sampling = table.computed[rows] == table.total[rows]
        self.pins.do_not_sample(rows, is_sampling)
        samples = rows[is_sampling]
        forked, sources = self._fork(samples, draft, now)
        samples = np.concatenate([samples, forked])
        table.total[samples if not self.num_beam_searches else self._without_beams(samples)] += 1
        num_planned = int(num_tokens.sum())
        self.num_planned_tokens += num_planned
        self.queue.tenants.charge(table.tenant[rows], num_tokens + is_sampling)
        plan = Plan(
            step_id=draft.step_id,
            rows=rows,
            num_tokens=num_tokens,
            computed_bound=(table.computed[rows] - num_tokens).astype(np.int32),
            sample_rows=samples,
            num_candidates=table.num_candidates[samples],
            sources=sources,
            forked=(*self.forked, *draft.forked),
            host_tokens=tuple(self.host_tokens),
            started=tuple(draft.started),
            released=np.asarray(self._released, np.int32),
            block_writes=draft.block_writes(),
            moves=draft.moves(),
        )
        self._released, self.forked, self.host_tokens = [], [], []
        self._next_step_id += 1
        lines = np.concatenate([rows, forked, np.array(plan.idle_rows, np.int32)])
        row_epochs, row_sequences = table.epoch[lines], table.sequences[lines]
        epochs, sequences = row_epochs, row_sequences
        if len(samples) < len(lines):
            epochs, sequences = table.epoch[samples], table.sequences[samples]
        self.flights.append(
            Flight(plan, row_epochs, row_sequences, epochs, sequences, draft.shared)
        )
        self.events.append(Planned(now, plan.step_id, len(rows), num_planned, plan))
        return plan

    def _fork(self, samples: Int32, draft: Draft, now: float) -> tuple[Int32, Int32]:
        """Fork the leaders among the rows that sample: the new rows, which sample too, and the rows
        whose logits all of them use (nothing if each uses its own)."""
        children: list[int] = []
        parents: list[int] = []
        for row in samples.tolist() if self.num_unforked else ():
            leader = self.table.sequences[row]
            if leader.group is not None and leader.group.reserved_rows and not is_beam(leader):
                rows = fork_members(self, leader, draft, now)
                self.num_long_stop_lists += len(rows) * _has_long_stop_list(leader.request)
                self.num_unforked -= 1
                children += rows
                parents += [row] * len(rows)
        if not children:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        self.insert_rows(children)
        return (
            np.asarray(children, np.int32),
            np.concatenate([samples, np.asarray(parents, np.int32)]),
        )

    def _without_beams(self, rows: Int32) -> Int32:
        """Those of the rows that will get a token, and not candidates to choose from."""
        return rows[[not is_beam(sequence) for sequence in self.table.sequences[rows]]]

    def insert_rows(self, rows: list[int]) -> None:
        """Let rows run whose sequences and arrivals are in the table."""
        order = np.concatenate([self._running, np.asarray(rows, np.int64)])
        table = self.table
        self._running = order[np.lexsort((table.arrival[order], table.priority[order]))]

    # ---- door 4: update ----------------------------------------------------------------------

    def update(self, result: StepResult, now: float) -> StepOutputs:
        """Take the result of the oldest plan in flight: pending tokens become known."""
        assert result.error is None, "a step that failed is to be repeated row by row first"
        outputs = take_result(self, self.flights.popleft(), result, now)
        for sequence in self._admitted:
            outputs.update_of(sequence).prefix = sequence.report
        self._admitted = []
        for sequence in self.pins.settle(now):
            outputs.finish(sequence, Finish("pinned"))
            self.finish(sequence, "pinned", now)
        # After it: a step with an error may have copied nothing out.
        settled = [] if self.kv.tier is None else self.kv.tier.settle(result.step_id)
        if self.stores is not None:
            self.stores.keep(settled)
        return self.take_late(outputs)

    def take_late(self, outputs: OutputsBuilder | None = None) -> StepOutputs:
        """Hand out, with these outputs or alone, what requests that were dropped are told."""
        outputs = outputs or OutputsBuilder()
        for sequence, finish in self.late:
            outputs.finish(sequence, finish)
        self.late = []
        return outputs.build()

    # ---- rows --------------------------------------------------------------------------------

    def take_row(self, sequence: Sequence, num_computed: int, draft: Draft, now: float) -> None:
        """Give the sequence a row; the plan writes its known tokens and sampling there."""
        table, request, params = self.table, sequence.request, sequence.params
        row = sequence.row = self._free_rows.pop()
        known = sequence.saved_tokens
        table.tokens[row, : len(known)] = known
        table.computed[row] = num_computed
        table.total[row] = table.known[row] = len(known)
        table.limit[row] = sequence.limit
        table.num_open[row] = sequence.is_open
        table.capacity[row] = sequence.blocks.capacity
        table.index_at[row] = 0 if self.is_indexed(sequence) else NEVER
        table.min_known[row] = sequence.num_prompt_tokens + params.min_tokens
        table.num_candidates[row] = -1 if params.logprobs is None else params.logprobs
        table.stop_ids[row] = -1
        stop_ids = request.stop_token_ids[:NUM_STOP_IDS]
        table.stop_ids[row, : len(stop_ids)] = stop_ids
        table.sequences[row] = sequence
        table.arrival[row], table.priority[row] = sequence.arrival, sequence.priority
        table.tenant[row] = sequence.tenant
        others = self._running
        is_before = table.priority[others] < sequence.priority
        is_before |= (table.priority[others] == sequence.priority) & (
            table.arrival[others] < sequence.arrival
        )
        self._running = np.insert(others, np.count_nonzero(is_before), row)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num_computed
        group = sequence.group
        if group is not None and not group.is_forked:
            for _ in range(group.num_members - 1):
                group.reserved_rows.append(self._free_rows.pop())
            self.num_unforked += 1
        draft.started.append(
            RowStart(
                row=row,
                token_ids=known,
                num_computed_tokens=num_computed,
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=params,
                seed=request.seed,
                sample_index=sequence.index,
                stop_token_ids=request.stop_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
            )
        )
        self.events.append(Admitted(now, request.request_id, row, num_computed, sequence.index))

    def free_rows(self, rows: list[int]) -> None:
        """Rows that nobody has started."""
        self._free_rows += rows

    def remember(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Tell of a request that was just admitted what its prompt found in the cache."""
        sequence.report = self.history.report(sequence, hit, now)
        self.history.enter(sequence)
        says_something = sequence.report.num_tokens > 0 or sequence.report.miss
        if says_something and not is_beam(sequence):  # of a search all is told at the end
            self._admitted.append(sequence)
        self.events.append(PrefixFound(now, sequence.request.request_id, sequence.report))

    def leave_row(self, sequence: Sequence) -> None:
        """Free the blocks and the row; known tokens are kept, pending ones will still arrive."""
        row, table = sequence.row, self.table
        sequence.num_pending_lost = int(table.total[row] - table.known[row])
        sequence.saved_tokens = sequence.known_tokens.copy()
        self.kv.free(sequence.blocks)
        sequence.row = -1
        table.sequences[row] = None
        table.epoch[row] += 1
        self._running = self._running[self._running != row]
        self._free_rows.append(row)
        self._released.append(row)
        if self.forked or self.host_tokens:
            self.forked = [fork for fork in self.forked if fork.child != row]
            self.host_tokens = [tokens for tokens in self.host_tokens if tokens.row != row]

    def finish(self, sequence: Sequence, reason: str, now: float) -> None:
        """End a sequence: `reason` is stop, length, abort, error, timeout or pinned. The request
        ends with the last of its sequences."""
        self.history.leave(sequence)
        if sequence.row >= 0:
            self.leave_row(sequence)
        elif not sequence.is_aside:
            self.queue.remove(sequence)
        give_rows_back(self, sequence)
        forget(self, sequence)
        if self.stores is not None:
            self.stores.drop(sequence)
        if sequence.is_pin:
            self.pins.drop(sequence)
        sequence.finish_reason = reason
        self.num_long_stop_lists -= _has_long_stop_list(sequence.request)
        members = self.members(sequence)
        self.headroom.take_end()
        if all(member.finish_reason is not None for member in members):
            request_id = sequence.request.request_id
            del self.sequences[request_id]
            self.queue.tenants.leave(sequence.request.tenant)
            self.num_beam_searches -= sequence.request.params.use_beam_search
            told, is_search = num_told(members), sequence.request.params.use_beam_search
            self.events.append(Finished(now, request_id, reason, *told, is_search))

    def flush(self) -> Plan | None:
        """At the end, without plans in flight: a plan that only copies to host memory what the
        index has and nobody holds, as far as there is room."""
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        return flush(self, step_id)

    def keep_flushed(self, plan: Plan) -> None:
        """That plan was carried out: order it all to be kept."""
        if self.kv.tier is not None and self.stores is not None:
            self.stores.keep(self.kv.tier.settle(plan.step_id), most=int(NEVER))

    def check_invariants(self) -> None:
        """Assert that counters, rows and blocks agree."""
        check_invariants(self)


def _has_long_stop_list(request: Request) -> bool:
    return len(request.stop_token_ids) > NUM_STOP_IDS
