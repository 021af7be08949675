"""P table 1: the number of tokens that fit next to each model, by quire's own memory plan."""

from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs
from benchmarks.paper.settings import OPT_13B, OPT_66B, OPT_175B, Setting
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.tools.devices import find_gpu
from quire.tools.sizing.fit import fit

SETTINGS = (OPT_13B, OPT_66B, OPT_175B)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Compare planned slots with the published ones."""
    planned = [_slots(setting) for setting in SETTINGS]
    published = [setting.num_slots for setting in SETTINGS]
    bar_positions = [float(index) for index in range(len(SETTINGS))]
    findings = [
        Finding(f"tokens of keys and values, {setting.name}", ours, 0.5 * theirs, 1.5 * theirs,
                f"{theirs:,}")
        for setting, ours, theirs in zip(SETTINGS, planned, published, strict=True)
    ]  # fmt: skip
    text = (
        "quire's plans hold fewer tokens. Each sets aside memory for the largest step, for CUDA"
        " graphs, and 8 % of the device. All other figures use the published numbers."
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


def _slots(setting: Setting) -> int:
    config = config_from_flat(model=setting.model, tensor_parallel_size=setting.num_devices)
    found = fit(config, resolve_model(setting.model), find_gpu(setting.device))
    return found.memory.num_slots
