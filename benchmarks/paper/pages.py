"""Render the pages of the evaluation, without their plots."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paper.figure import Figure
from benchmarks.paper.section import section, shown, wrapped

OVERVIEW = "evaluation.md"
MARK = "<!-- made by make paper -->"
LEGEND = (
    "P is *Efficient Memory Management for Large Language Model Serving with PagedAttention* (SOSP"
    " 2023). T is *vLLM: An Efficient Inference Engine for Large Language Models* (2025)."
)
INTRODUCTION = (
    "These pages repeat the figures of two papers with quire and show where the results agree."
    " The first table has the numbers that the papers give in their text."
)
# Paragraphs about how the figures are made.
METHOD = (
    "`make paper` makes these pages, their plots and `benchmarks/results/virtual-time/paper.json`"
    " in a quarter of an hour on two cores.",
    "Unless a figure says that it was measured, it is [simulated](../operate/simulate.md). quire is"
    " its own core, scheduler and memory under a virtual clock. The other systems follow the"
    " paper's description (`benchmarks/paper/baselines/`). All systems have the same requests and"
    " the same step times.",
    "A formula computes the step times from the models' shapes and the A100's data sheet, plus 18"
    " ms for the overhead of engines of 2023. `benchmarks/paper/settings.py` has them. So compare"
    " ratios"
    " between systems with the paper, not rates per second.",
    "A trace is ten minutes long. The lengths of requests follow the paper's means; the paper does"
    " not give their spread.",
    "A band is the range in which a number must lie. The tests check the bands on shorter traces.",
)


@dataclass(frozen=True)
class Page:
    """One page: the figures of these modules."""

    name: str
    title: str
    about: str
    modules: tuple[str, ...]


PAGES = (
    Page(
        "evaluation-memory.md",
        "Evaluation: memory and batches",
        "How the systems use memory for keys and values, and how many requests they batch.",
        ("fig_1", "table_1", "fig_2_13", "real", "fig_18b"),
    ),
    Page(
        "evaluation-latency.md",
        "Evaluation: latency against rate",
        "Which rate of requests each system sustains, for three models and two workloads.",
        ("fig_12",),
    ),
    Page(
        "evaluation-sharing.md",
        "Evaluation: sharing",
        "What samples, beams, prefixes and conversations gain from shared blocks.",
        ("fig_14_15", "fig_16", "fig_17"),
    ),
    Page(
        "evaluation-scheduling.md",
        "Evaluation: scheduling",
        "The effects of preemption, chunks, policies, plans in flight, draft tokens and replicas,"
        " and how exact the simulator is.",
        (
            "fig_19",
            "table_4_1",
            "chunks",
            "policies",
            "host_time",
            "speculation",
            "replicas",
            "fidelity",
        ),
    ),
)


def pages_of(made: dict[str, list[Figure]]) -> dict[str, str]:
    """Return the text of all pages by file name. made: the figures of each module."""
    texts = {OVERVIEW: _overview(made)}
    for page in PAGES:
        lines = [
            MARK,
            f"# {page.title}",
            "",
            wrapped(f"This page shows {lowered(page.about)} {LEGEND}"),
            "",
        ]
        lines += ["[The papers' evaluation](evaluation.md) says how the figures are made.", ""]
        lines += [section(figure) for figure in _figures(made, page)]
        texts[page.name] = "\n".join(lines)
    return texts


def lowered(text: str) -> str:
    """Return a sentence that continues another one."""
    return text[0].lower() + text[1:]


def _figures(made: dict[str, list[Figure]], page: Page) -> Sequence[Figure]:
    return [figure for module in page.modules for figure in made.get(module, [])]


def _overview(made: dict[str, list[Figure]]) -> str:
    lines = [MARK, "# The papers' evaluation", "", wrapped(f"{INTRODUCTION} {LEGEND}"), ""]
    lines += ["| figure | what | quire | paper |", "|---|---|---|---|"]
    for page in PAGES:
        for figure in _figures(made, page):
            for finding in figure.findings:
                if finding.published:
                    ours = f"{shown(finding.ours)}{finding.unit}"
                    link = f"[{figure.source.split(',')[0]}]({page.name})"
                    lines.append(f"| {link} | {finding.what} | {ours} | {finding.published} |")
    lines += ["", "## Pages", ""]
    for page in PAGES:
        link = f"[{page.name.removesuffix('.md')}]({page.name})"
        lines.append(wrapped(f"- {link}: {page.about}", "  "))
    lines += ["", "## How the figures are made", ""]
    for paragraph in METHOD:
        lines += [wrapped(paragraph), ""]
    return "\n".join(lines)
