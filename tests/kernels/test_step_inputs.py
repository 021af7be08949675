"""The rows' state on a GPU against the torch reference and plain loops; sizes are those of the
largest step."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.base.plan import Plan, RowFork
from quire.ops.kernels import step_inputs as kernels
from quire.ops.memory import lazy_zeros
from quire.ops.step_inputs import RowState, gather_step_reference
from quire.runner.rows import DeviceRows

ROWS, TOKENS = 7, 60
POISON = 12345  # in memory that must be written or must not be read
COMPUTED, TOKEN = kernels.COMPUTED.value, kernels.TOKEN.value


def ints(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_state(
    block_size: int, num_groups: int, device: torch.device, num_rows: int = ROWS
) -> kernels.RowTensors:
    generator = torch.Generator().manual_seed(block_size)
    num_blocks = -(-TOKENS // block_size)

    def numbers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    return kernels.RowTensors(
        numbers(1000, num_rows, TOKENS).int().to(device),
        numbers(TOKENS - 30, num_rows).to(device),
        numbers(99, num_groups, num_rows, num_blocks).int().to(device),
        block_size,
    )


def scheduled(
    rows: list[int], counts: list[int], max_rows: int, device: torch.device
) -> kernels.Scheduled:
    """With what an earlier, larger step has left behind."""
    rest = [POISON] * (max_rows - len(rows))
    return kernels.Scheduled(
        ints(*rows, *rest, device=device),
        ints(*counts, *rest, device=device),
        ints(len(rows), device=device),
    )


def poisoned(state: kernels.RowTensors, max_tokens: int, max_rows: int, longest: int):
    groups, device = len(state.tables_GRL), state.tokens_RM.device
    buffers = kernels.StepBuffers.empty(max_tokens, max_rows, groups, longest, device)
    for values in vars(buffers).values():
        values.fill_(POISON)
    return buffers


def check_gathered(
    state: kernels.RowTensors, rows: list[int], counts: list[int], found, longest: int
) -> None:
    """Against the reference where there are tokens, rows and blocks; and the padding."""
    plain = RowState(state.tokens_RM, state.computed_R, list(state.tables_GRL), state.block_size)
    arrays = np.asarray(rows, np.int32), np.asarray(counts, np.int32)
    wanted = gather_step_reference(plain, *arrays, longest)
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
def test_inputs_are_those_of_the_rows(
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


def test_a_full_step(device: torch.device) -> None:
    """No padding at all, and a table no wider than the longest context."""
    state = random_state(16, 1, device)
    state.computed_R[:3] = torch.tensor([30, 0, 31])
    found = kernels.gather_step(
        state, scheduled([0, 1, 2], [2, 5, 1], 3, device), poisoned(state, 8, 3, 2)
    )
    check_gathered(state, [0, 1, 2], [2, 5, 1], found, 2)


def test_several_chunks_of_a_row(device: torch.device) -> None:
    """A prompt, a table and padding that take several programs, and these several turns."""
    generator = torch.Generator().manual_seed(1)
    length = kernels.BLOCK * (kernels.MOST_CHUNKS + 1) + 9
    state = kernels.RowTensors(
        torch.randint(1000, (2, length), generator=generator).int().to(device),
        torch.tensor([3, 1], device=device),
        torch.randint(99, (1, 2, length), generator=generator).int().to(device),
        block_size=1,
    )
    counts = [1, length - 3]
    found = kernels.gather_step(
        state, scheduled([0, 1], counts, 2, device), poisoned(state, 2 * length, 2, length)
    )
    check_gathered(state, [0, 1], counts, found, length)


def test_rows_beyond_32_bits(device: torch.device) -> None:
    num_rows, length = 2**17 + 1, 2**14
    try:  # 8 GiB of addresses each, of which nothing is used
        tokens = lazy_zeros((num_rows, length), torch.int32, device)
        tables = lazy_zeros((1, num_rows, length), torch.int32, device)
    except (MemoryError, torch.OutOfMemoryError):
        pytest.skip("there is too little memory")
    computed = lazy_zeros((num_rows,), torch.int64, device)
    state = kernels.RowTensors(tokens, computed, tables, block_size=1)
    last = num_rows - 1
    deltas = [(0, last, 1, 77), (TOKEN, last, 1, 88), (COMPUTED, last, 0, 1)]
    buffer = torch.tensor(deltas, dtype=torch.int32, device=device)
    kernels.apply_deltas(state, buffer, ints(3, device=device))
    given = scheduled([last], [1], 1, device)
    found = kernels.gather_step(state, given, poisoned(state, 1, 1, 2))
    assert (found.ids_T.item(), found.positions_T.item(), found.slots_T[0].item()) == (88, 1, 77)
    samples = ints(last, 0, device=device).view(1, 2)
    one = ints(1, device=device)
    kernels.advance(state, given, found.context_lens_S, samples, one, ints(99, device=device))
    assert state.tokens_RM[last, :4].tolist() == [0, 88, 99, 0]
    assert not state.tokens_RM[:9, :9].any()


def test_more_tokens_than_there_is_room_for_write_no_foreign_memory(device: torch.device) -> None:
    state = random_state(16, 1, device)
    wide = poisoned(state, 12, 2, 4)
    narrow = kernels.StepBuffers(
        wide.ids_T[:5],
        wide.positions_T[:5],
        wide.query_starts_S1,
        wide.context_lens_S,
        wide.slots_GT[:, :5],
        wide.block_tables_GSL,
    )
    kernels.gather_step(state, scheduled([0, 1], [4, 4], 2, device), narrow)
    for values in (wide.ids_T, wide.positions_T, wide.slots_GT[0]):
        assert bool((values[:5] != POISON).all()) and bool((values[5:] == POISON).all())


def apply_plainly(state: kernels.RowTensors, deltas: list[tuple[int, int, int, int]]) -> None:
    for group, row, index, value in deltas:
        if group == COMPUTED:
            state.computed_R[row] = value
        elif group == TOKEN:
            state.tokens_RM[row, index] = value
        else:
            state.tables_GRL[group, row, index] = value


@pytest.mark.parametrize("count", [0, 1, 20, 300])
def test_deltas(count: int, device: torch.device) -> None:
    """Many of them for the same places, of which the last counts; none behind the count."""
    random.seed(count)
    state, wanted = (random_state(16, 2, device) for _ in range(2))
    deltas = [
        (random.choice([0, 1, TOKEN]), random.randrange(ROWS), random.randrange(4), value)
        for value in range(count)
    ]
    deltas += [(COMPUTED, random.randrange(ROWS), 0, value) for value in range(count // 10)]
    random.shuffle(deltas)
    apply_plainly(wanted, deltas)
    buffer = torch.full((len(deltas) + 140, 4), 0, dtype=torch.int32, device=device)
    buffer[:, 3] = POISON
    if deltas:
        buffer[: len(deltas)] = torch.tensor(deltas)
    kernels.apply_deltas(state, buffer, ints(len(deltas), device=device))
    assert torch.equal(state.tables_GRL, wanted.tables_GRL)
    assert torch.equal(state.computed_R, wanted.computed_R)
    assert torch.equal(state.tokens_RM, wanted.tokens_RM)


def test_more_deltas_than_programs_take_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(kernels, "DELTA_PROGRAMS", 2)
    test_deltas(300, device)


def test_a_table_entry_that_is_written_twice(device: torch.device) -> None:
    """As by a prefix hit whose last block is copied: a plan adopts a block, then replaces it."""
    state = random_state(16, 1, device)
    deltas = torch.full((200, 4), 0, dtype=torch.int32, device=device)
    deltas[:, 2] = torch.arange(200, device=device) % 2
    deltas[:, 3] = torch.arange(200, device=device)
    kernels.apply_deltas(state, deltas, ints(200, device=device))
    assert state.tables_GRL[0, 0, :2].tolist() == [198, 199]


@dataclass
class Step:
    """A plan's rows, and what a device has of it."""

    plan: Plan
    state: kernels.RowTensors
    device: torch.device

    def advance(self, ids: list[int], most: int) -> None:
        plan = self.plan
        rows = plan.rows.tolist()
        given = scheduled(rows, plan.num_tokens.tolist(), 6, self.device)
        inputs = kernels.gather_step(self.state, given, poisoned(self.state, 40, 6, 4))
        pairs = [
            (row, rows.index(source))
            for row, source in zip(plan.sample_rows, plan.sample_sources, strict=True)
        ]
        samples = torch.zeros(most, 2, dtype=torch.int32, device=self.device)
        samples[len(pairs) :] = POISON
        if pairs:
            samples[: len(pairs)] = torch.tensor(pairs)
        padded = torch.tensor(ids + [POISON] * (most - len(ids)), device=self.device)
        count = ints(len(pairs), device=self.device)
        kernels.advance(self.state, given, inputs.context_lens_S, samples, count, padded)


def device_rows(state: kernels.RowTensors) -> DeviceRows:
    """A copy as the runner has it."""
    groups, rows, _ = state.tables_GRL.shape
    copy = DeviceRows(rows, TOKENS, groups, state.block_size, state.tokens_RM.device)
    copy.tokens_RM[:], copy.computed_R[:] = state.tokens_RM, state.computed_R
    return copy


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
def test_advance(name: str, times: int, device: torch.device) -> None:
    """As the runner's rows do it; a step that is repeated changes nothing more."""
    plan, state = PLANS[name], random_state(16, 1, device)
    rows = device_rows(state)
    ids = [2000 + i for i in range(len(plan.sample_rows))]
    if len(plan.rows):
        at = [plan.rows.tolist().index(source) for source in plan.sample_sources]
        contexts = state.computed_R[plan.rows.tolist()].cpu().numpy() + plan.num_tokens
        rows.advance(plan, torch.tensor(ids), contexts[at])
    step = Step(plan, state, device)
    before = state.computed_R.clone()
    for _ in range(times):
        state.computed_R[:] = before  # gathered anew
        step.advance(ids, most=kernels.ADVANCED + 2 if name == "forks" else 5)
    assert torch.equal(state.tokens_RM, rows.tokens_RM)
    assert torch.equal(state.computed_R, rows.computed_R)


def test_a_token_behind_a_full_row_is_dropped(device: torch.device) -> None:
    state = random_state(16, 1, device)
    state.computed_R[1] = TOKENS - 1
    tokens = state.tokens_RM.clone()
    plan = Plan(0, np.int32([1]), np.int32([1]), sample_rows=np.int32([1]))
    Step(plan, state, device).advance([2000], most=1)
    assert torch.equal(state.tokens_RM, tokens)
    assert int(state.computed_R[1]) == TOKENS


def test_steps_in_a_row(device: torch.device) -> None:
    """A prompt in two chunks, then three tokens, beside another row; as plain lists have it."""
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
