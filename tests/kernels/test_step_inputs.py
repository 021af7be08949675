"""Compare row state on a GPU with the torch reference and plain loops, up to the largest step."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.base.plan import Plan, RowFork
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.kernels import step_inputs as kernels
from quire.ops.kernels.row_deltas import COMPUTED, SlotLayout, receive
from quire.ops.rows import row_state
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import gather_step_reference

ROWS, TOKENS = 7, 60
POISON = 12345  # in memory that must be written or must not be read


def ints(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_state(
    block_size: int, num_groups: int, device: torch.device, num_rows: int = ROWS
) -> RowTensors:
    generator = torch.Generator().manual_seed(block_size)
    num_blocks = -(-TOKENS // block_size)

    def numbers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    return RowTensors(
        numbers(1000, num_rows, TOKENS).int().to(device),
        numbers(TOKENS - 30, num_rows).to(device),
        numbers(99, num_groups, num_rows, num_blocks).int().to(device),
        numbers(99, 8, num_rows).int().to(device),
        numbers(99, 3, num_rows).to(device),
        block_size,
        prompt_column=2,
    )


def scheduled(
    rows: list[int],
    counts: list[int],
    max_rows: int,
    device: torch.device,
    pairs: list[tuple[int, int]] | None = None,
    result_slot: int = 0,
) -> kernels.Inbox:
    """Return an inbox that held a larger step before. pairs: sampling rows and their places."""
    inbox, flat = kernels.Inbox.empty(max_rows, device), [x for pair in pairs or () for x in pair]
    inbox.words[kernels.HEADER :] = POISON
    inbox.words[:3] = ints(len(rows), len(pairs or ()), result_slot, device=device)
    at = kernels.HEADER
    for values, room in ((rows, max_rows), (counts, max_rows), (flat, 2 * max_rows)):
        inbox.words[at : at + len(values)] = ints(*values, device=device)
        at += room
    return inbox


def poisoned(state: RowTensors, max_tokens: int, max_rows: int, longest: int):
    groups, device = len(state.tables_GRL), state.tokens_RM.device
    buffers = kernels.StepBuffers.empty(max_tokens, max_rows, groups, longest, device)
    for values in vars(buffers).values():
        values.fill_(POISON)
    return buffers


def check_gathered(
    state: RowTensors, rows: list[int], counts: list[int], found, longest: int
) -> None:
    """Compare tokens, rows and blocks with the reference, and check the padding."""
    arrays = np.asarray(rows, np.int32), np.asarray(counts, np.int32)
    wanted = gather_step_reference(state, *arrays, longest)
    total, num_rows = sum(counts), len(rows)
    assert torch.equal(found.ids_T[:total], wanted.ids_T)
    assert torch.equal(found.positions_T[:total], wanted.positions_T)
    assert not found.ids_T[total:].any() and not found.positions_T[total:].any()
    assert torch.equal(found.query_starts_S1[: num_rows + 1], wanted.query_starts_S1)
    assert bool((found.query_starts_S1[num_rows:] == total).all())
    assert torch.equal(found.context_lens_S[:num_rows], wanted.context_lens_S)
    assert not found.context_lens_S[num_rows:].any()
    contexts = wanted.context_lens_S.tolist() + [0] * (len(found.context_lens_S) - num_rows)
    for mine, theirs in zip(found.slots_T, wanted.slots_T, strict=True):
        assert torch.equal(mine[:total], theirs) and bool((mine[total:] == -1).all())
    for mine, theirs in zip(found.block_tables_SL, wanted.block_tables_SL, strict=True):
        for s, context in enumerate(contexts):
            used = -(-context // state.block_size)
            assert s >= num_rows or torch.equal(mine[s, :used], theirs[s, :used])
            assert bool((mine[s, used:] == -1).all())


ORDER = [5, 0, 3, 6, 1, 2, 4]
STEPS = [[1], [1, 1, 1], [4, 1, 30], [17, 1, 2, 1, 9, 1, 1], []]


@pytest.mark.parametrize(("block_size", "num_groups"), [(1, 1), (16, 2), (5, 3)])
@pytest.mark.parametrize("counts", STEPS)
def test_gathered_inputs_equal_the_reference(
    block_size: int, num_groups: int, counts: list[int], device: torch.device
) -> None:
    state = random_state(block_size, num_groups, device)
    before = [x.clone() for x in (state.tokens_RM, state.computed_R, state.tables_GRL)]
    longest = -(-TOKENS // block_size)
    rows = ORDER[: len(counts)]
    found = kernels.gather_step(
        state, scheduled(rows, counts, 9, device), poisoned(state, 40, 9, longest)
    )
    check_gathered(state, rows, counts, found, longest)
    after = (state.tokens_RM, state.computed_R, state.tables_GRL)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_full_step_equals_the_reference(device: torch.device) -> None:
    """There is no padding, and the table is no wider than the longest context."""
    state = random_state(16, 1, device)
    state.computed_R[:3] = torch.tensor([30, 0, 31])
    found = kernels.gather_step(
        state, scheduled([0, 1, 2], [2, 5, 1], 3, device), poisoned(state, 8, 3, 2)
    )
    check_gathered(state, [0, 1, 2], [2, 5, 1], found, 2)


def test_several_programs_gather_long_rows(device: torch.device) -> None:
    """Prompt, table and padding take several programs, and several iterations of each."""
    generator = torch.Generator().manual_seed(1)
    length = kernels.BLOCK * (kernels.MAX_CHUNKS + 1) + 9
    state = RowTensors(
        torch.randint(1000, (2, length), generator=generator).int().to(device),
        torch.tensor([3, 1], device=device),
        torch.randint(99, (1, 2, length), generator=generator).int().to(device),
        torch.zeros(1, 2, dtype=torch.int32, device=device),
        torch.zeros(1, 2, dtype=torch.int64, device=device),
        block_size=1,
    )
    counts = [1, length - 3]
    found = kernels.gather_step(
        state, scheduled([0, 1], counts, 2, device), poisoned(state, 2 * length, 2, length)
    )
    check_gathered(state, [0, 1], counts, found, length)


def test_row_offsets_may_exceed_32_bits(device: torch.device) -> None:
    num_rows, length = 2**17 + 1, 2**14
    try:  # each reserves 8 GiB of addresses and uses almost none
        tokens = lazy_zeros((num_rows, length), torch.int32, device)
        tables = lazy_zeros((1, num_rows, length), torch.int32, device)
    except (MemoryError, torch.OutOfMemoryError):
        pytest.skip("there is too little memory")
    computed = lazy_zeros((num_rows,), torch.int64, device)
    columns = (lazy_zeros((1, num_rows), dtype, device) for dtype in (torch.int32, torch.int64))
    state = RowTensors(tokens, computed, tables, *columns, block_size=1)
    last = num_rows - 1
    layout = SlotLayout(1, 2, 1, 1)
    slot = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
    slot[layout.deltas_at : layout.runs_at] = ints(
        0, last, 1, 77, COMPUTED, last, 0, 1, device=device
    )
    slot[layout.runs_at : layout.forks_at] = ints(last, 1, 0, 1, device=device)
    slot[layout.tokens_at] = 88
    receive(state, kernels.Inbox.empty(1, device), slot, layout, 2, 1, False)
    given = scheduled([last], [1], 1, device, [(last, 0)])
    buffers = poisoned(state, 1, 1, 2)
    found = kernels.gather_step(state, given, buffers)
    assert (found.ids_T.item(), found.positions_T.item(), found.slots_T[0].item()) == (88, 1, 77)
    assert buffers.samples_4S[:, 0].tolist() == [last, 0, 2, 0]
    is_valid, results = torch.ones(1, dtype=torch.bool, device=device), ints(0, device=device)
    token = ints(99, device=device)
    kernels.advance(state, given, found.context_lens_S, token, is_valid, results.view(1, 1))
    assert state.tokens_RM[last, :4].tolist() == [0, 88, 99, 0]
    assert not state.tokens_RM[:9, :9].any()


def test_tokens_beyond_the_buffers_are_not_written(device: torch.device) -> None:
    state = random_state(16, 1, device)
    wide = poisoned(state, 12, 2, 4)
    narrow = kernels.StepBuffers(
        wide.ids_T[:5],
        wide.positions_T[:5],
        wide.query_starts_S1,
        wide.context_lens_S,
        wide.slots_GT[:, :5],
        wide.block_tables_GSL,
        wide.samples_4S,
    )
    kernels.gather_step(state, scheduled([0, 1], [4, 4], 2, device), narrow)
    for values in (wide.ids_T, wide.positions_T, wide.slots_GT[0]):
        assert bool((values[:5] != POISON).all()) and bool((values[5:] == POISON).all())


@dataclass
class Step:
    """A plan, and the row state on a device."""

    plan: Plan
    state: RowTensors
    device: torch.device

    def advance(self, ids: list[int], most: int, invalid: tuple[int, ...] = ()) -> list[int]:
        """Run the step and return its results."""
        plan = self.plan
        pairs = list(zip(plan.sample_rows.tolist(), plan.sample_indices.tolist(), strict=True))
        given = scheduled(
            plan.rows.tolist(), plan.num_tokens.tolist(), most, self.device, pairs, result_slot=1
        )
        buffers = poisoned(self.state, 40, most, 4)
        inputs = kernels.gather_step(self.state, given, buffers)
        self.check_samples(buffers.samples_4S)
        padded = torch.tensor(ids + [POISON] * (most - len(ids)), device=self.device)
        is_valid = torch.ones(most, dtype=torch.bool, device=self.device)
        is_valid[list(invalid)] = False
        results = torch.full((2, most), POISON, dtype=torch.int32, device=self.device)
        contexts = inputs.context_lens_S
        kernels.advance(self.state, given, contexts, padded, is_valid, results)
        assert bool((results[0] == POISON).all() and (results[1, len(pairs) :] == POISON).all())
        found: list[int] = results[1, : len(pairs)].tolist()
        return found

    def check_samples(self, samples_4S: torch.Tensor) -> None:
        """Check sampling's inputs for each sampling row; padding is 0."""
        plan, rows = self.plan, self.plan.rows.tolist()
        ends = np.cumsum(plan.num_tokens)
        num = len(plan.sample_rows)
        for n, (row, source) in enumerate(zip(plan.sample_rows, plan.sample_sources, strict=True)):
            at = rows.index(source)
            length = int(self.state.computed_R[source]) + plan.num_tokens[at]
            prompt_len = int(self.state.wide_CR[2, row])
            assert samples_4S[:, n].tolist() == [row, ends[at] - 1, length, prompt_len]
        assert not samples_4S[:, num:].any()


PLANS = {
    "decode": Plan(0, np.int32([4, 1]), np.int32([1, 1]), sample_rows=np.int32([1, 4])),
    "mixed": Plan(0, np.int32([4, 1, 6]), np.int32([20, 1, 7]), sample_rows=np.int32([1])),
    "nothing_sampled": Plan(0, np.int32([2]), np.int32([5])),
    "forks": Plan(
        0,
        np.int32([4, 1]),
        np.int32([3, 1]),
        sample_rows=np.int32([4, 1, 0, 5]),
        sources=np.int32([4, 1, 4, 4]),
        forked=(RowFork(4, 0, 1), RowFork(4, 5, 2)),
    ),
    "nothing": Plan(0),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("times", [1, 2])
def test_advance_equals_torchs_operations(name: str, times: int, device: torch.device) -> None:
    """A repeated step changes nothing more."""
    plan, state, wanted = PLANS[name], random_state(16, 1, device), random_state(16, 1, device)
    ids = [2000 + i for i in range(len(plan.sample_rows))]
    rows = torch.tensor(plan.rows.tolist(), dtype=torch.int64, device=device)
    contexts = state.computed_R[rows] + torch.tensor(plan.num_tokens, device=device)
    sampling = torch.tensor(plan.sample_rows.tolist(), dtype=torch.int64, device=device)
    lengths = contexts[torch.tensor(plan.sample_indices, device=device)]
    row_state.advance(wanted, rows, contexts, sampling, lengths, torch.tensor(ids, device=device))
    step = Step(plan, state, device)
    before = state.computed_R.clone()
    for _ in range(times):
        state.computed_R[:] = before  # gathered again
        assert step.advance(ids, most=kernels.ADVANCED + 2 if name == "forks" else 5) == ids
    assert torch.equal(state.tokens_RM, wanted.tokens_RM)
    assert torch.equal(state.computed_R, wanted.computed_R)


def test_row_without_a_valid_token_gets_result_minus_1(device: torch.device) -> None:
    """Its state gets token 0, which is never returned."""
    state = random_state(16, 1, device)
    lengths = (state.computed_R[[1, 4]] + 1).tolist()
    assert Step(PLANS["decode"], state, device).advance([2000, 2001], 5, (1,)) == [2000, -1]
    assert state.tokens_RM[1, lengths[0]] == 2000 and state.tokens_RM[4, lengths[1]] == 0


@pytest.mark.parametrize("num_samples", [0, 3, kernels.ADVANCED + 2])
def test_advance_writes_results_and_flags_to_the_mail(
    num_samples: int, device: torch.device
) -> None:
    """Results are in the step's slot; each program writes the ticket into its flag."""
    most = kernels.ADVANCED + 5
    state = random_state(16, 1, device, most)
    rows = list(range(most))[::-1][:num_samples]
    pairs = [(row, i) for i, row in enumerate(rows)]
    inbox = scheduled(rows, [1] * num_samples, most, device, pairs, result_slot=1)
    inbox.words[kernels.TICKET] = 77
    width = kernels.Mail.width(most)
    words = torch.full((3, width), POISON, dtype=torch.int32, device=device)
    buffers = poisoned(state, most, most, 4)
    contexts = kernels.gather_step(state, inbox, buffers).context_lens_S
    ids = torch.arange(most, device=device)
    is_valid = ids != 1
    results = torch.full((3, most), POISON, dtype=torch.int32, device=device)
    mail = kernels.Mail(words, most)
    kernels.advance(state, inbox, contexts, ids, is_valid, results, mail)
    assert torch.equal(words[1, :most], results[1])
    wanted = [-1 if i == 1 else i for i in range(num_samples)]
    assert words[1, :num_samples].tolist() == wanted
    assert words[1, most : most + 2].tolist() == [77, 77]
    assert kernels.num_flags(num_samples) == (1 if num_samples <= kernels.ADVANCED else 2)
    words[1, : most + 2] = POISON
    assert bool((words == POISON).all()), "nothing else is written"


def test_token_after_a_full_row_is_dropped(device: torch.device) -> None:
    state = random_state(16, 1, device)
    state.computed_R[1] = TOKENS - 1
    tokens = state.tokens_RM.clone()
    plan = Plan(0, np.int32([1]), np.int32([1]), sample_rows=np.int32([1]))
    Step(plan, state, device).advance([2000], most=1)
    assert torch.equal(state.tokens_RM, tokens)
    assert int(state.computed_R[1]) == TOKENS


def test_consecutive_steps_equal_plain_lists(device: torch.device) -> None:
    """A row computes a prompt in two chunks, then three tokens, alongside another row."""
    state = random_state(5, 2, device)
    state.computed_R[:] = 0
    wanted = state.tokens_RM.tolist()
    computed, lengths = [0] * ROWS, [11, 3]
    for step, counts in enumerate([[6, 3], [5, 1], [1, 1], [1, 1]]):
        plan = Plan(0, np.int32([2, 6]), np.int32(counts))
        sampling = [i for i in (0, 1) if computed[plan.rows[i]] + counts[i] == lengths[i]]
        plan = Plan(0, plan.rows, plan.num_tokens, sample_rows=plan.rows[sampling].astype(np.int32))
        ids = [3000 + 10 * step + i for i in sampling]
        Step(plan, state, device).advance(ids, most=2)
        for i, row in enumerate((2, 6)):
            computed[row] += counts[i]
        for i, token in zip(sampling, ids, strict=True):
            wanted[(2, 6)[i]][lengths[i]] = token
            lengths[i] += 1
    assert state.tokens_RM.tolist() == wanted and state.computed_R.tolist() == computed
