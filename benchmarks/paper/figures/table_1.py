"""P table 1: the number of tokens that fit next to each model, by quire's own memory plan."""

from benchmarks.paper.bands import near, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs
from benchmarks.paper.settings import OPT_13B, OPT_66B, OPT_175B
from quire.tools.sizing.fit import Fit

SETTINGS = (OPT_13B, OPT_66B, OPT_175B)
MEMORY_GIB = (12, 21, 264)  # for keys and values, in the same table


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Compare planned slots with the published ones."""
    fits = [setting.plan for setting in SETTINGS]
    planned = [found.memory.num_slots for found in fits]
    published = [setting.num_slots for setting in SETTINGS]
    bar_positions = [float(index) for index in range(len(SETTINGS))]
    rounded = "2 %: the published GiB are rounded"
    findings = [
        near(f"slots of {gib} GiB, {setting.name}", gib * 2**30 / _token_bytes(found),
             setting.num_slots, 0.02, "", rounded)
        for setting, gib, found in zip(SETTINGS, MEMORY_GIB, fits, strict=True)
    ]  # fmt: skip
    less = "less than published, but more than half: quire sets more memory aside"
    findings += [
        order(f"slots that quire plans over the published ones, {setting.name}", ours / theirs,
              0.5, 1.0, "", less)
        for setting, ours, theirs in zip(SETTINGS, planned, published, strict=True)
    ]  # fmt: skip
    text = (
        "The published memory and the shapes of the models give the published slots. quire's plans"
        " hold fewer tokens. Each sets aside memory for the largest step, for CUDA graphs, and 8 %"
        " of the device. All other figures use the published numbers."
    )
    return [
        Figure(
            "table_1",
            "Memory for keys and values",
            "P table 1",
            "",
            "tokens",
            [
                Curve("quire fit", bar_positions, [float(each) for each in planned]),
                Curve("paper", bar_positions, [float(each) for each in published], True),
            ],
            findings,
            text,
            BARS,
            [setting.name for setting in SETTINGS],
        )
    ]


def _token_bytes(found: Fit) -> float:
    """Return the bytes of a token's keys and values, on all devices together."""
    of_block = sum(group.block_bytes for group in found.groups)
    return of_block * found.config.parallel.tensor_parallel_size / found.config.cache.block_size
