"""P fig. 16: translation, where all prompts begin with the same examples."""

from dataclasses import replace

from benchmarks.paper.bands import near
from benchmarks.paper.figure import Effort, Figure, Runs, run_each
from benchmarks.paper.settings import LLAMA_13B, TRANSLATION, Load
from benchmarks.paper.sweep import PLOTTED_S, sweep
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, PLAIN, QUIRE

SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX)
PREFIXES = (
    ("a", "one example", 80, 1.67),
    ("b", "five examples", 341, 3.58),
)
FIRST_RATE = 10.0
CACHED = replace(PLAIN, caches=True)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make one figure for each length of the prefix."""
    shorter = replace(effort, seconds=effort.seconds / 4)  # there are many requests per second
    cases = [
        (system, LLAMA_13B, Load(TRANSLATION, FIRST_RATE, 0.0, prefix=prefix), shorter, CACHED)
        for _, _, prefix, *_ in PREFIXES
        for system in SYSTEMS
    ]
    found = run_each(runs, sweep, cases)
    made = []
    for index, (letter, prefix_kind, prefix, published) in enumerate(PREFIXES):
        sweeps = {each.system: each for each in found[index * 4 : index * 4 + 4]}
        ratio = sweeps[QUIRE].sustained / sweeps[ORCA_ORACLE].sustained
        hits = 100 * sweeps[QUIRE].points[-1].hits
        text = (
            f"The prefix index finds the prefix ({prefix_kind}, {prefix} tokens) like any other:"
            f" {hits:.0f} % of the prompt tokens are cached. The paper names the data set but not"
            " its lengths; the lengths of sentences are assumed (`benchmarks/paper/settings.py`)."
        )
        finding = near("sustained rate, quire over Orca (Oracle)", ratio, published)
        made.append(
            Figure(
                f"fig_16{letter}",
                f"A shared prefix of {prefix} tokens: LLaMA-13B, translation",
                f"P fig. 16 {letter}",
                "requests per second",
                "normalized latency (s per token)",
                [each.curve for each in sweeps.values()],
                [finding],
                text,
                y_limit=PLOTTED_S,
                seconds=shorter.seconds,
                rates=[each.rates for each in sweeps.values()],
            )
        )
    return made
