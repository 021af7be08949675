"""A plain device for scheduler tests: rows and blocks that hold tokens instead of keys and values.

Every scheduled token is written, as a checksum of its prefix, into the slot that the block table
names. The first and the last token of each row then read their whole visible context back through
the table. So a block that was freed, shared or overwritten wrongly is noticed. `expected_tokens`,
which knows no blocks, computes the right text.

Requests can be cursed. Then a step raises if it computes their token at a position, or one after
it. Or, if the step samples, its results are garbage, and so are results computed from them (as with
NaN). Sampling from garbage is an error of the row. The request's seed identifies a row.

The allowed tokens of a row with a grammar are a function of the grammar's text and the output so
far (`allowed_tokens`). A stand-in (`FakeGrammars`) makes the masks, and so compiles nothing.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.base.events import Event
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.messages import GrammarReady, Request
from quire.base.plan import Candidates, Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.executors.executor import failed_step
from quire.kv.table import NULL
from quire.scheduler.core.sequence import Sequence, State
from quire.spec.cache_group import CHUNKED, STATE, CacheGroup

Work = tuple[Plan, MaskPromise | None]

VOCAB = 50
GARBAGE = -2


@dataclass
class Curse:
    """raises: whether the step raises; otherwise the row computes garbage in sampling steps."""

    position: int
    raises: bool


class CursedStep(Exception):
    """A step with a cursed row in it."""


def next_token(context: list[int], allowed: list[int] | None = None) -> int:
    number = zlib.crc32(np.asarray(context, np.int32).tobytes())
    return number % VOCAB if allowed is None else allowed[number % len(allowed)]


def candidates_of(context: list[int], num: int, allowed: list[int] | None = None) -> Candidates:
    """Return the best tokens, by scores that depend on the whole context."""
    state = zlib.crc32(np.asarray(context, np.int32).tobytes())
    scores = [-(1 + zlib.crc32(b"%d %d" % (state, t)) % 997) / 256 for t in range(VOCAB)]
    logprobs = np.asarray(scores, np.float32)
    if allowed is not None:
        logprobs[np.setdiff1d(np.arange(VOCAB), allowed)] = -np.inf
    best = np.argsort(-logprobs, kind="stable")[:num]
    best = np.concatenate([best[:1], best])
    return Candidates(best.astype(np.int32), logprobs[best], 1)


def allowed_tokens(grammar: str, output: list[int]) -> list[int]:
    """Return about a third of all tokens, as a grammar might allow them."""
    state = zlib.crc32(repr((grammar, output)).encode())
    found = [t for t in range(VOCAB) if zlib.crc32(b"%d %d" % (state, t)) % 3 == 0]
    return found or [state % VOCAB]


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """Return the tokens that a request must generate, whatever else the engine does."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    params = request.params
    most = min(params.max_tokens or max_model_len, max_model_len - len(tokens))
    while len(output) < most:
        allowed = allowed_tokens(request.grammar, output) if request.grammar else None
        token = next_token(tokens, allowed)
        tokens.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= params.min_tokens:
            break
    return output


class FakeDevice:
    """Carries out plans in order. It checks only what a real device needs."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        size: int,
        num_host_blocks: tuple[int, ...] | None = None,
    ):
        self.groups, self.size = groups, size
        self.slots = [np.full(n * size, -1, np.int64) for n in num_blocks]
        self.host_slots = [np.full(n * size, -1, np.int64) for n in num_host_blocks or num_blocks]
        self.swapped_step_id = -1
        self.num_swapped = 0
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.seeds: dict[int, int] = {}
        self.curses: dict[int, Curse] = {}  # by seed
        self.num_raised = 0
        self.waits_for_masks = False  # on a thread of its own
        self.lost: tuple[int, list[set[int]]] = -1, []  # in a step: slots of rows that failed alone
        self.num_draft_tokens = self.num_right = 0  # drafts of its own
        self.unsure: set[int] = set()  # rows that had some: their positions in plans are bounds

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        self._apply(plan)
        drafts = {draft.row: draft.token_ids.tolist() for draft in plan.drafts}
        if plan.is_guessing:
            drafts = {row: self._guess(row, len(found)) for row, found in drafts.items()}
        for row, guesses in drafts.items():
            known = self.tokens[row][: self.computed[row] + 1]  # more, if the step is repeated
            assert self.tokens[row] in (known, known + guesses), "drafts after a pending token"
            self.tokens[row] = known + guesses
        spans = [
            (row, self.computed[row], self.computed[row] + count)
            for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)
        ]
        for (row, start, _), bound in zip(spans, plan.computed_bound.tolist(), strict=True):
            assert start == bound or (start < bound and row in self.unsure), "wrong bounds"
        ends = {row: end - len(drafts.get(row, ())) for row, _, end in spans}
        for span in spans:
            self._write(*span, ends[span[0]], span[0] in plan.sample_rows)
        garbled = {row for row, start, end in spans if self._is_garbled(row, start, end, ends[row])}
        self._raise_if_cursed(plan.step_id, spans)
        sources = dict(zip(plan.sample_rows.tolist(), plan.sample_sources.tolist(), strict=True))
        behind, unservable = self._allowed(plan, masks)
        allowed = {row: positions[0] or [0] for row, positions in behind.items()}
        sampled, errors = self._sample(sources, garbled, ends, allowed)
        errors |= unservable
        accepted = self._accept(drafts, sampled, errors, behind)
        if plan.is_guessing:
            self.num_draft_tokens += sum(map(len, drafts.values()))
            self.num_right += sum(map(len, accepted.values()))
        for row, _, _ in spans:
            self.computed[row] = ends[row] + len(accepted.get(row, ()))
            self._write_all_states(row, ends[row], self.computed[row], is_cursed=row in garbled)
        for fork in plan.new_forks:
            self.computed[fork.child] = self.computed[fork.parent]
        lists = [[token, *accepted.get(row, ())] for row, token in sampled.items()]
        token_ids = np.zeros((len(lists), max(map(len, lists), default=1)), np.int32)
        for i, tokens in enumerate(lists):
            token_ids[i, : len(tokens)] = tokens
        return StepResult(
            plan.step_id,
            token_ids,
            np.array([len(tokens) for tokens in lists], np.int32),
            self._candidates(plan, allowed),
            row_errors=errors,
            unservable_rows=tuple(unservable),
        )

    def _apply(self, plan: Plan) -> None:
        for start in plan.started:
            self.tokens[start.row] = start.token_ids.tolist()
            self.computed[start.row] = start.num_computed_tokens
            self.unsure.discard(start.row)
            self.seeds[start.row] = start.seed
        for fork in plan.forked:
            self._fork(fork.parent, fork.child)
        for host in plan.host_tokens:
            known = self.tokens[host.row][: host.position]
            self.tokens[host.row] = known + host.token_ids.tolist()
        writes = plan.block_writes
        columns = (writes.group, writes.row, writes.index, writes.block_id)
        for group, row, index, block_id in zip(*(c.tolist() for c in columns), strict=True):
            self.tables[group][row, index] = block_id
        for move in plan.moves:
            device = self.slots[move.group].reshape(-1, self.size)
            host = self.host_slots[move.group].reshape(-1, self.size)
            if move.kind == "swap_out" and plan.step_id != self.swapped_step_id:
                host[move.destination] = device[move.source]
                self.num_swapped += 1
            elif move.kind == "load":
                device[move.destination] = host[move.source]
            elif move.kind == "copy":
                device[move.destination] = device[move.source]
        self.swapped_step_id = plan.step_id
        if self.lost[0] == plan.step_id:  # a repeated copy has overwritten the garbage
            for slots, lost in zip(self.slots, self.lost[1], strict=True):
                slots[list(lost)] = GARBAGE

    def _guess(self, row: int, num: int) -> list[int]:
        """Return drafts of the device, most of them right, for after the row's last token."""
        self.unsure.add(row)
        context = self.tokens[row][: self.computed[row] + 1]
        wrong = zlib.crc32(b"%d %d" % (len(context), context[-1])) % (num + 2)
        for i in range(num):
            context = [*context, VOCAB - 1 if i == wrong else next_token(context)]
        return context[-num:]

    def _fork(self, parent: int, child: int) -> None:
        self.unsure.discard(child)
        self.tokens[child] = self.tokens[parent].copy()
        self.computed[child] = self.computed[parent]
        self.seeds[child] = self.seeds[parent]
        for table in self.tables:
            for (row, index), block_id in list(table.items()):
                if row == parent:
                    table[child, index] = block_id

    def _slot(self, group: int, row: int, position: int) -> int:
        block_id = self.tables[group][row, position // self.size]
        return block_id * self.size + position % self.size

    def _content(self, row: int, position: int) -> int:
        return zlib.crc32(np.asarray(self.tokens[row][: position + 1], np.int32).tobytes())

    def _write(self, row: int, start: int, end: int, known: int, samples: bool) -> None:
        """Write the row's slots. Drafts, which begin at `known`, write no states, and do not start
        the row's curse."""
        curse = self.curses.get(self.seeds[row])
        is_cursed = curse is not None and known > curse.position and (curse.raises or samples)
        for position in range(start, end):
            content = GARBAGE if is_cursed else self._content(row, position)
            for g, group in enumerate(self.groups):
                if group.kind != STATE:
                    self.slots[g][self._slot(g, row, position)] = content
        self._write_all_states(row, start, known, is_cursed)

    def _write_all_states(self, row: int, start: int, end: int, is_cursed: bool) -> None:
        for g, group in enumerate(self.groups):
            if group.kind == STATE and start < end:
                self._write_states(g, row, start, end, is_cursed)

    def _state(self, group: int, row: int, position: int) -> int:
        """Return the slot of the state after a position, which is the last one of its block."""
        return (self._slot(group, row, position) // self.size + 1) * self.size - 1

    def _write_states(self, g: int, row: int, start: int, end: int, is_cursed: bool) -> None:
        """Write the states of these tokens, each computed from the state before."""
        if start > 0 and not is_cursed:
            before = self.slots[g][self._state(g, row, start - 1)]
            assert before in (GARBAGE, self._content(row, start - 1)), f"group {g}, row {row}"
            is_cursed |= before == GARBAGE
        for index in range(start // self.size, (end - 1) // self.size + 1):
            last = min(end, (index + 1) * self.size) - 1
            if self.tables[g][row, index] >= 0:
                content = GARBAGE if is_cursed else self._content(row, last)
                self.slots[g][self._state(g, row, last)] = content

    def _is_garbled(self, row: int, start: int, end: int, known: int) -> bool:
        """Return whether the row's new tokens see garbage; then they are garbage too. Only tokens
        before `known` have states."""
        sees = [self._sees_garbage(row, position) for position in (start, end - 1)]
        sees += [self._sees_garbage_state(row, position) for position in (start, known - 1)]
        if any(sees):
            self._write_all_states(row, start, known, is_cursed=True)
            for g, group in enumerate(self.groups):
                for position in range(start, end) if group.kind != STATE else ():
                    self.slots[g][self._slot(g, row, position)] = GARBAGE
        return any(sees)

    def _sees_garbage_state(self, row: int, position: int) -> bool:
        groups = [g for g, group in enumerate(self.groups) if group.kind == STATE]
        return any(self._is_last_state_garbage(g, row, position) for g in groups)

    def _sees_garbage(self, row: int, position: int) -> bool:
        """Return whether the token sees garbage. It may see only its own prefix or garbage."""
        sees = False
        for g, group in enumerate(self.groups):
            if group.kind == STATE:
                continue
            first = max(0, position - group.window + 1) if group.window else 0
            if group.kind == CHUNKED and group.window:
                first = position // group.window * group.window
            for p in range(first, position + 1):
                found = self.slots[g][self._slot(g, row, p)]
                sees |= found == GARBAGE
                own = self._content(row, p)
                assert found in (GARBAGE, own), f"group {g}, row {row}, position {p}"
        return sees

    def _is_last_state_garbage(self, g: int, row: int, position: int) -> bool:
        """Return whether a state is garbage; it was just written, or may have been."""
        block_id = self.tables[g].get((row, position // self.size), NULL)
        return block_id != NULL and bool(self.slots[g][(block_id + 1) * self.size - 1] == GARBAGE)

    def _raise_if_cursed(self, step_id: int, spans: list[tuple[int, int, int]]) -> None:
        for row, start, end in spans:
            curse = self.curses.get(self.seeds[row])
            if curse is not None and curse.raises and end > curse.position:
                self.num_raised += 1
                if len(spans) == 1:
                    self._lose(step_id, row, range(start, end))
                raise CursedStep(f"row {row}")

    def _lose(self, step_id: int, row: int, positions: range) -> None:
        """Note that the row's tokens in this step were not computed."""
        before = self.lost[1] if self.lost[0] == step_id else [set() for _ in self.groups]
        for g, slots in enumerate(before):
            if self.groups[g].kind != STATE:
                slots |= {self._slot(g, row, position) for position in positions}
        self.lost = step_id, before

    def _candidates(self, plan: Plan, allowed: dict[int, list[int]]) -> dict[int, Candidates]:
        """Return candidates for the rows of beam searches, and take back their sampled tokens."""
        found = {}
        for row, num in zip(plan.sample_rows.tolist(), plan.num_candidates.tolist(), strict=True):
            if num >= 0:
                self.tokens[row].pop()
                found[row] = candidates_of(self.tokens[row], num, allowed.get(row))
        return found

    def _sample(
        self,
        sources: dict[int, int],
        garbled: set[int],
        ends: dict[int, int],
        allowed: dict[int, list[int]],
    ) -> tuple[dict[int, int], dict[int, str]]:
        sampled = {}
        for row, source in sources.items():
            known = self.tokens[row][: ends[source]]
            token = 0 if source in garbled else next_token(known, allowed.get(row))
            sampled[row] = token
            self.tokens[row] = [*known, token]
        bad = {row: "garbage" for row, source in sources.items() if source in garbled}
        return sampled, bad

    def _accept(
        self,
        drafts: dict[int, list[int]],
        sampled: dict[int, int],
        errors: dict[int, str],
        behind: dict[int, list[list[int]]],
    ) -> dict[int, list[int]]:
        """Return the tokens sampled after each right draft. behind: tokens that masks allow there;
        drafts end where they allow none."""
        accepted: dict[int, list[int]] = {}
        for row, guesses in drafts.items():
            last, more = sampled[row], accepted.setdefault(row, [])
            for i, guess in enumerate([] if row in errors else guesses, 1):
                allowed = behind[row][i] if row in behind else None
                if guess != last or allowed == []:
                    break
                last = next_token(self.tokens[row], allowed)
                self.tokens[row].append(last)
                more.append(last)
        return accepted

    def _allowed(
        self, plan: Plan, masks: MaskPromise | None
    ) -> tuple[dict[int, list[list[int]]], dict[int, str]]:
        """Return the allowed tokens at each position, and grammar errors, by row. On the core's own
        thread the masks must be ready, since no other thread makes them."""
        assert (masks is None) == (len(plan.masked_rows) == 0), "masks or masked rows are missing"
        if masks is None:
            return {}, {}
        assert self.waits_for_masks or masks.is_there, "masks that will never be ready"
        found, rows = masks.wait(), plan.masked_rows.tolist()
        words = np.ascontiguousarray(found.of(plan.masked_rows))
        bits = np.unpackbits(words.view(np.uint8), axis=2, bitorder="little")[:, :, :VOCAB]
        allowed = {
            row: [np.flatnonzero(b).tolist() for b in positions]
            for row, positions in zip(rows, bits, strict=True)
        }
        errors = {row: "nothing is allowed" for row in rows if not allowed[row][0]}
        errors |= {row: found.errors[row] for row in rows if row in found.errors}
        return allowed, errors


class FakeGrammars:
    """Stands in for `engine/grammars/grammars.py`: a test says when a grammar is compiled."""

    has_answers = False
    num_open = 0

    def __init__(self) -> None:
        self.pending: list[Request] = []

    def take(self) -> list[GrammarReady]:
        return []

    def hear(self, events: list[Event]) -> None:
        pass

    def close(self) -> None:
        pass

    def begin(self, request: Request) -> None:
        self.pending.append(request)

    def compile(self, pick: int, fails: bool = False) -> GrammarReady | None:
        if not self.pending:
            return None
        request = self.pending.pop(pick % len(self.pending))
        return GrammarReady(request.request_id, "a bad grammar" if fails else None)

    def fill(self, promise: MaskPromise, plan: Plan, sequences: dict[int, Sequence]) -> None:
        """Make the masks of each row, after the known tokens of its sequence and after each
        draft."""
        assert not promise.is_there, "masks made twice"
        guesses = {draft.row: draft.token_ids.tolist() for draft in plan.drafts}
        num_positions = 1 + max(map(len, guesses.values()), default=0)
        bits = np.ones((len(plan.masked_rows), num_positions, 64), bool)
        for positions, row in zip(bits, plan.masked_rows.tolist(), strict=True):
            sequence = sequences[row]
            if sequence.state is not State.ENDED:
                output = sequence.known_tokens[sequence.num_prompt_tokens :].tolist()
                positions[:] = False
                for i in range(1 + len(guesses.get(row, ()))):
                    behind = output + guesses[row][:i] if i else output
                    positions[i, allowed_tokens(sequence.request.grammar, behind)] = True
        words = np.packbits(bits, axis=2, bitorder="little").view(np.int32)
        promise.put(TokenMasks(plan.masked_rows, words))

    def forgo(self, promise: MaskPromise, plan: Plan) -> None:
        assert not promise.is_there, "masks were made too early"
        shape = len(plan.masked_rows), 1 + int(plan.num_drafts.max(initial=0)), 2
        promise.put(TokenMasks(plan.masked_rows, np.full(shape, -1, np.int32)))


class QueueExecutor:
    """Base of executors in tests: a queue of plans or results, and nothing to start or close."""

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def is_ready(self) -> bool:
        return len(self._queue) > 0

    def copy_bytes_per_s(self) -> float:
        return 1e9

    def close(self) -> None:
        pass


class FakeExecutor(QueueExecutor):
    """Carries out plans when they are submitted, or only when their result is requested."""

    def __init__(self, device: FakeDevice, is_lazy: bool) -> None:
        super().__init__()
        self.device, self.is_lazy = device, is_lazy
        self.has_failed = False

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.has_failed &= len(self._queue) > 0
        self._queue.append((plan, masks) if self.is_lazy else self._run(plan, masks))

    def next_result(self) -> StepResult:
        oldest: Work | StepResult = self._queue.popleft()
        return self._run(*oldest) if isinstance(oldest, tuple) else oldest

    def _run(self, plan: Plan, masks: MaskPromise | None) -> StepResult:
        """Run a plan. Plans after a failed one are not run, and get a failed result."""
        if self.has_failed:
            assert masks is None or masks.is_there, "a launch would wait for the masks for ever"
            return failed_step(plan, "a step before it failed")
        try:
            return self.device.run(plan, masks)
        except CursedStep as error:
            self.has_failed = True
            return failed_step(plan, str(error))


def make_request(name: str, prompt: list[int], **params: object) -> Request:
    stops = tuple(params.pop("stops", ()))  # type: ignore[arg-type]
    salt = str(params.pop("salt", ""))
    priority = int(params.pop("priority", 0))  # type: ignore[call-overload]
    tenant = str(params.pop("tenant", ""))
    timeout_s = float(params.pop("timeout_s", 0.0))  # type: ignore[arg-type]
    seed = int(params.pop("seed", 0))  # type: ignore[call-overload]
    grammar = str(params.pop("grammar", ""))
    transfer = params.pop("transfer", None)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        stop_token_ids=stops,
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
        timeout_s=timeout_s,
        grammar=grammar,
        kv_transfer=transfer,  # type: ignore[arg-type]
    )
