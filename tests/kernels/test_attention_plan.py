"""Check attention's work list in plain Python: it covers each token's keys exactly once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.ops.attention_inputs import AttentionStep
from quire.ops.kernels.attention.attention_plan import Cut, Work, plan_work
from tests.support.cases import in_turn

FINE = Cut(max_splits=8, short_chunk=16, long_chunk=32, align=16)
FIXED = Cut(is_fixed=True, align=16, fixed_chunk=48, split_tiles=2)
# Rows as (context with the step's tokens, tokens of the step); 0 tokens pad a captured step.
MIXES = {
    "decode": [(18, 1), (1, 1), (700, 1), (64, 1), (65, 1)],
    "mixed": [(90, 90), (31, 1), (700, 40), (12, 7), (500, 3), (600, 300)],
    "padded": [(31, 1), (77, 0), (300, 2), (0, 0), (0, 0)],
    "many": [(5 + 20 * i, 1 + i % 5) for i in range(17)],
    "edges": [(63 + i, 1) for i in range(4)] + [(80 + i, 9) for i in range(4)],
    "one": [(2000, 1)],
}
CUTS = {
    "fine": replace(FINE, group_size=2),
    "window": replace(FINE, group_size=2, window=50),
    "chunk": replace(FINE, group_size=2, window=-50),
    "group_7": replace(FINE, group_size=7),
    "wide_group": replace(FINE, group_size=20),
    "usual": Cut(4),
    "few_items": replace(FINE, group_size=2, items=2),
    "few_items_window": replace(FINE, group_size=7, items=3, window=50),
    "one_split": replace(FINE, group_size=4, max_splits=1),
    "fixed": FIXED.of_group(4, None, 64),
    "fixed_window": FIXED.of_group(16, 50, 64),
    "fixed_chunk": FIXED.of_group(16, -50, 64),
    "fixed_unsplit": replace(FIXED, split_tiles=0).of_group(4, None, 64),
    "fixed_usual": Cut(is_fixed=True).of_group(4, None, 128),
}


def make_step(rows: list[tuple[int, int]], device: torch.device, more: int = 0) -> AttentionStep:
    """more: by how much the host's bounds exceed the device's lengths."""
    contexts, queries = np.array(rows, np.int32).T
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return AttentionStep(
        positions_T=nothing,
        query_starts_S1=torch.from_numpy(starts).to(device),
        context_lens_S=torch.from_numpy(np.ascontiguousarray(contexts)).to(device),
        slots_T=(nothing,),
        block_tables_SL=(torch.zeros((len(rows), 1), dtype=torch.int32, device=device),),
        query_lens_host=queries + np.int32(more),
        context_lens_host=contexts + np.int32(more),
    )


def make_work(cut: Cut, rows: list[tuple[int, int]], device: torch.device, more: int = 0) -> Work:
    step = make_step(rows, device, more)
    return plan_work(cut, step, step.block_tables_SL[0])


def listed(work: Work) -> tuple[list[list[int]], list[list[int]]]:
    """Return the items and the merges, after checking that they fit the bounds."""
    num_items, num_merges = work.counts[:2].tolist()
    assert num_items <= work.bounds.items == len(work.items)
    assert num_merges <= work.bounds.merges == len(work.merges)
    return work.items[:num_items].tolist(), work.merges[:num_merges].tolist()


@pytest.mark.parametrize(("name", "mix"), in_turn([*CUTS], [*MIXES]))
def test_work_covers_every_key_of_every_token_once(
    name: str, mix: str, device: torch.device
) -> None:
    cut, rows = CUTS[name], MIXES[mix]
    check_work(make_work(cut, rows, device), cut, rows)


@pytest.mark.parametrize("name", ["fine", "fixed"])
@pytest.mark.parametrize("more", [1, 5, 400])
def test_device_lengths_may_be_below_the_hosts_bounds(
    more: int, name: str, device: torch.device
) -> None:
    cut, rows = CUTS[name], MIXES["mixed"]
    check_work(make_work(cut, rows, device, more), cut, rows)


def check_work(work: Work, cut: Cut, rows: list[tuple[int, int]]) -> None:
    """Check that the work covers these rows, and that its slots match its merges."""
    items, merges = listed(work)
    starts = np.concatenate(([0], np.cumsum([queries for _, queries in rows])))
    covered: dict[int, list[int]] = {t: [] for t in range(starts[-1])}
    slots: dict[int, list[int]] = {t: [] for t in covered}
    of_tokens = {token: (slot, number) for token, slot, number, _ in merges}
    for row, token, count, position, first, end, slot, per_token, *of_tile in items:
        context, queries = rows[row]
        assert 1 <= count * cut.group_size <= max(cut.long_rows, cut.short_rows)
        assert starts[row] <= token and token + count <= starts[row + 1]
        assert position == context - queries + token - starts[row]
        assert work.has_long or count * cut.group_size <= cut.short_rows
        for i in range(count):
            covered[token + i] += range(first, end)
            if slot >= 0 and first < end:
                slots[token + i].append(slot + i * per_token)
        if slot >= 0 and first < end and not cut.is_fixed:
            assert all(
                of_tokens[token + i] == (of_tile[0] + i * per_token, of_tile[1])
                for i in range(count)
            )
    for row, (context, queries) in enumerate(rows):
        for t in range(starts[row], starts[row + 1]):
            last = context - queries + t - starts[row]
            lowest = max(0, last - cut.window + 1) if cut.window else 0
            if cut.window < 0:
                lowest = last // -cut.window * -cut.window
            assert sorted(covered[t]) == list(range(min(covered[t]), max(covered[t]) + 1))
            assert min(covered[t]) <= lowest and last <= max(covered[t]) < context
    merged = {t: list(range(slot, slot + number)) for t, slot, number, _ in merges}
    assert len(merged) == len(merges)
    assert merged == {t: sorted(found) for t, found in slots.items() if found}
    every = [slot for found in slots.values() for slot in found]
    assert len(set(every)) == len(every)
    assert not every or max(every) < work.bounds.slots


@pytest.mark.parametrize("rows", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(
    "cut", [pytest.param(cut, id=name) for name, cut in CUTS.items() if not cut.is_fixed]
)
def test_host_needs_only_the_total_tokens_and_the_longest_context(
    cut: Cut, rows: list[tuple[int, int]], device: torch.device
) -> None:
    """A recorded step is planned for a number of tokens and rows, and a longest context. Fixed
    cuts are excluded: they depend on each row's lengths."""
    step = make_step(rows, device)
    tokens = np.zeros(len(rows), np.int32)
    tokens[0] = sum(queries for _, queries in rows)
    contexts = np.full(len(rows), max(context for context, _ in rows), np.int32)
    step = replace(step, query_lens_host=tokens, context_lens_host=contexts)
    work = plan_work(cut, step, step.block_tables_SL[0])
    check_work(work, cut, rows)


@pytest.mark.parametrize("name", ["usual", "fixed"])
def test_steps_with_one_tile_per_row_get_zeroed_arrival_counters(
    name: str, device: torch.device
) -> None:
    """There is one counter for each row and KV head. Fixed cuts and other steps have none."""
    for rows in ("one", "verify", "mixed"):
        given = MIXES.get(rows, [(300, 3), (77, 0), (900, 4)])
        step = make_step(given, device)
        work = plan_work(CUTS[name], step, step.block_tables_SL[0], arriving_heads=3)
        check_work(work, CUTS[name], given)
        if name == "fixed" or rows == "mixed":
            assert work.arrivals is None
            continue
        assert work.arrivals is not None
        assert work.arrivals.tolist() == [[0] * 3] * len(given)
        tiles = [row for row, _, _, _, first, *_ in listed(work)[0] if first == 0]
        assert len(tiles) == len(set(tiles)), "a row has several tiles"


@pytest.mark.parametrize("items", [1, 3, 20])
def test_step_is_cut_into_about_as_many_items_as_programs(items: int, device: torch.device) -> None:
    """Few rows are cut into many chunks, many rows are not cut."""
    cut = replace(FINE, group_size=4, items=items, max_splits=64)
    for rows in ([(640, 1)], [(320, 1)] * 2, [(64, 1)] * 10, [(16, 1)] * 40):
        found, merges = listed(make_work(cut, rows, device))
        assert items / 2 <= len(found) <= items + len(rows)
        assert not merges or len(rows) <= items


def test_rows_of_long_tiles_and_the_longest_tiles_come_first(device: torch.device) -> None:
    cut = replace(CUTS["usual"], long_chunk=1024)
    items, _ = listed(make_work(cut, MIXES["mixed"], device))
    is_long = [count * cut.group_size > cut.short_rows for _, _, count, *_ in items]
    row_is_long = [MIXES["mixed"][row][1] * cut.group_size > cut.short_rows for row, *_ in items]
    assert any(is_long) and row_is_long == sorted(row_is_long, reverse=True)
    ends = [end for row, _, _, _, _, end, *_ in items if row == 5]
    assert ends == sorted(ends, reverse=True) and len(ends) > 1


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_bounds_grow_with_the_lengths(cut: Cut) -> None:
    """A captured step is sized by its largest lengths, and replayed with smaller ones."""
    lens = np.array([1, 2, 5, 16, 17, 64, 65, 100, 300, 1000, 1025])
    bounds = [
        [cut.bounds(np.array([q]), np.array([n])) for q in lens] for n in (1025, 2000, 9000, 40000)
    ]
    numbers = np.array([[(m.items, m.merges, m.slots) for m in row] for row in bounds])
    assert (np.diff(numbers, axis=0) >= 0).all() and (np.diff(numbers, axis=1) >= 0).all()


@pytest.mark.parametrize("window", [None, 5, 50, 200])
def test_fixed_chunks_begin_at_the_same_keys_for_any_lengths(
    window: int | None, device: torch.device
) -> None:
    """Each item of a split row lies in one chunk, and no tile of keys lies in two."""
    cut = FIXED.of_group(4, window, 64)
    rows = [(700, 1), (701, 3), (320, 32), (321, 33), (97, 20), (600, 300), (48, 48), (49, 1)]
    items, _ = listed(make_work(cut, rows, device))
    for row, _, _, _, first, end, slot, *_ in items:
        assert first % cut.align == 0
        assert slot < 0 or first >= end or first // 48 == (end - 1) // 48
        tiles = -(-rows[row][1] * 4 // 64)
        if slot < 0 and tiles <= cut.split_tiles:
            assert first // 48 == (end - 1) // 48, "it could have been split"


def test_fixed_cut_with_fewer_parts_cuts_at_the_same_keys() -> None:
    queries, contexts = np.array([1, 20, 40]), np.array([900, 900, 900])
    cut, slots = FIXED.of_group(4, None, 64), []
    while cut is not None:
        slots.append(cut.bounds(queries, contexts).slots)
        last, cut = cut, cut.fewer
    assert slots == sorted(slots, reverse=True) and len(set(slots)) == 3 and slots[-1] == 0
    assert last == replace(FIXED.of_group(4, None, 64), split_tiles=0)


@pytest.mark.parametrize("window", [0, 50])
def test_rows_of_similar_lengths_are_not_cut(window: int, device: torch.device) -> None:
    """`leaves_uncut` predicts this on the host from the lengths."""
    cut, generator = replace(FINE, group_size=2, window=window, items=4), np.random.default_rng(1)
    found = []
    for num_rows in (1, 3, 4, 9, 20):
        for longest in (40, 60, 90):
            contexts = generator.integers(30, longest, num_rows)
            rows = [(int(context), 1) for context in contexts]
            is_uncut = cut.leaves_uncut(contexts)
            if is_uncut:
                assert listed(make_work(cut, rows, device))[1] == []
            found.append((num_rows, is_uncut))
    assert {is_uncut for rows, is_uncut in found if rows < 4} == {False}
    assert {is_uncut for rows, is_uncut in found if rows == 20} == {True}
    contexts = np.full(20, 30)
    assert not replace(cut, items=1).leaves_uncut(contexts), "one item is never cut"
    assert not FIXED.leaves_uncut(contexts)
    contexts[3] = 500
    assert cut.leaves_uncut(contexts) == (window > 0)


def test_uncut_step_has_nothing_to_merge(device: torch.device) -> None:
    work = make_work(CUTS["one_split"], MIXES["mixed"], device)
    assert work.bounds.merges == work.bounds.slots == 0
