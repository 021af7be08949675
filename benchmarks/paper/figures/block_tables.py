"""T fig. 4.4: how many block ids a step sends to the device, compared with the whole table.

quire's scheduler makes the plans, for decoding rows of several contexts. Only the plan's arrays for
block tables count (`BlockWrites`), four numbers for each entry.
"""

from benchmarks.paper.bands import near, order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.settings.config import SchedulerConfig

BLOCK_SIZE, ROWS, NUM_STEPS = 16, 32, 32
CONTEXTS = (512, 2048, 8192)
FEW_CONTEXTS = (512, 2048)
# The thesis' case: rows, tokens of each, and what its table takes.
MANY_ROWS, MANY_TOKENS, ENTRIES, TABLE_MB = 1000, 1_000_000, 62.5, 250.0
ID_BYTES, NUMBERS = 4, 4


def entries(rows: int, tokens: int) -> int:
    """Return the entries of a block table."""
    return rows * -(-tokens // BLOCK_SIZE)


def sent(context: int) -> float:
    """Return the block ids that a plan sends in a step, the mean over decoding steps."""
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=ROWS * context)
    blocks = ROWS * (context // BLOCK_SIZE + 8) * 11 // 10  # more than the watermark of admission
    scheduler, executor = dry_run(blocks, BLOCK_SIZE, config, context + 4 * NUM_STEPS, False)
    for row in range(ROWS):
        scheduler.add(dry_request(str(row), [5] * context, 2 * NUM_STEPS), 0.0)
    found = []
    for _ in range(NUM_STEPS + 1):
        plan = scheduler.schedule(0.0).plan
        found.append(len(plan.block_writes.block_id))
        executor.submit(plan)
        scheduler.update(executor.next_result(), 0.0)
    assert found[0] == entries(ROWS, context), "the first plan sends the whole table"
    return sum(found[1:]) / NUM_STEPS


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    contexts = CONTEXTS if effort.is_full else FEW_CONTEXTS
    found = run_each(runs, sent, [(context,) for context in contexts])
    delta = [NUMBERS * ID_BYTES * each for each in found]
    whole = [float(ID_BYTES * entries(ROWS, context)) for context in contexts]
    many = entries(MANY_ROWS, MANY_TOKENS)
    exact = "exact but for rounding"
    findings = [
        near("entries of a table of 1,000 x 1,000,000 tokens", many / 1e6, ENTRIES, 0.001,
             " million", exact),
        near("bytes of this table", many * ID_BYTES / 1e6, TABLE_MB, 0.001, " MB", exact),
        order("block ids sent in a step, by row and token", found[-1] / ROWS, 0.95 / BLOCK_SIZE,
              1.05 / BLOCK_SIZE, "the delta alone", "one new block for every 16 tokens of a row"),
        order("block ids sent, longest context over shortest", found[-1] / found[0], 0.99, 1.01,
              "the delta alone", "a step's traffic does not depend on the context"),
    ]  # fmt: skip
    text = (
        f"{ROWS} decoding rows. A row sends one block id for every {BLOCK_SIZE} tokens, whatever"
        f" its context. So the thesis' table sends {MANY_ROWS / BLOCK_SIZE:g} ids in a step, and"
        f" {NUMBERS * ID_BYTES * MANY_ROWS / BLOCK_SIZE / 1000:g} kB instead of {TABLE_MB:g} MB."
        " The device holds the table and gathers the rows of a step"
        " (`runner/gpu`, `ops/kernels`)."
    )
    x = [float(context) for context in contexts]
    return [
        Figure(
            "block_tables",
            "Block ids sent to the device in a step",
            "T 4.6.2, fig. 4.4",
            "tokens of each row",
            "bytes",
            [Curve("sent in a step", x, delta), Curve("the whole table", x, whole)],
            findings,
            text,
            is_log_x=True,
            is_log_y=True,
        )
    ]
