"""Render the pages of the evaluation, without their plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.figure import MISSED, ORDER, VALUE, Figure, Finding
from benchmarks.paper.section import section, shown, wrapped
from benchmarks.paper.sweep import LIMIT_S
from benchmarks.result_files import FOLDER, newest

OVERVIEW, CLAIMS = "evaluation.md", "papers.md"
MEASURED = "paper_measured"  # a result file
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
    " in some five minutes on two cores.",
    "Unless a figure says that it was measured, it is [simulated](../operate/simulate.md). quire is"
    " its own core, scheduler and memory under a virtual clock. The other systems follow the"
    " paper's description (`benchmarks/paper/baselines/`). All systems have the same requests.",
    "A formula computes the step times from the models' shapes and the A100's data sheet. The host"
    " of an engine of 2023 adds its time: 11.5 ms for each step and 0.26 ms for each request. These"
    " follow from public measurements of that engine, and from no figure"
    " (`benchmarks/paper/overhead.py`). FasterTransformer has no such time, as it is written in"
    " C++. Attention takes quire 23 % longer, as the paper measured it for blocks (P 7.1)."
    " [Assumptions](evaluation-assumptions.md) shows what other times would give.",
    "A point of a curve is a trace of the length that its figure states. A sustained rate is the"
    f" lower of two rates: where the latency reaches {LIMIT_S:g} s per token, and what the full"
    " system serves. A short trace ends before a growing queue shows in the latency, so the second"
    " rate is mostly the lower one. Each figure lists both."
    " [Sustained rates by the length of traces]"
    "(evaluation-latency.md#sustained-rates-by-the-length-of-traces) tries longer traces for figure"
    " 12 a, and for no other figure. The lengths of requests follow the paper's means; the paper"
    " does not give their spread.",
    "A band is the range in which a number must lie. Bands are set from the text, not from our"
    " results, and each has a stated reason. A number outside its band ends `make paper` with"
    " an error. The tests check the bands on fewer panels, and that more than ten faults in the"
    " allocator, the scheduler and the baselines break them"
    " (`tests/benchmarks/paper/test_mutants.py`). They also check that the result file has the"
    " bands of the code.",
)


CLAIMS_INTRODUCTION = (
    "This page lists each number of two papers' figures and tables that has a band, where it"
    " stands, and what quire shows. [From the papers to the code](../inside/papers.md) lists the"
    " mechanisms."
)
CLAIMS_COLUMNS = (
    'The first column links to the plot and the band. `make paper ARGS="--only MODULE"` makes the'
    " numbers of a module again. `benchmarks/paper/figures/MODULE.py` has its code, and"
    " `tests/benchmarks/paper/test_figures.py` its test."
)
CLAIMS_DRAWINGS = (
    "The other figures have no numbers to compare. P fig. 3 to 10 and T fig. 2.1, 4.1 to 4.3 and"
    " 4.5 are drawings of mechanisms, which [From the papers to the code](../inside/papers.md)"
    " links to tests. P fig. 11 has the lengths of requests. T chapter 3 has P's figures again."
)
CLAIMS_OWN = (
    "Bands without a published sentence: {num}. They guard results of ours, and do not count here."
)
CLAIMS_INPUTS = (
    "These published numbers are inputs of the simulations and formulas. This page does not check"
    " them:",
    "- The slots of P table 1, for all systems: quire's own memory plan has fewer.",
    "- Attention over blocks takes 23 % longer, the middle of 20 to 26 % (P fig. 18 a, 7.1). This"
    " is a property of the paper's GPU kernels. The line of figure 18 a is of quire's CPU kernel.",
    "- The mean lengths of prompts and outputs (P fig. 11).",
    "- The lengths of the shared prefixes, 80 and 341 tokens (P 6.4).",
    "- The cut of a chat's prompts and outputs at 1,024 tokens (P 6.5).",
    "- The models' longest sequence, 2,048 tokens (P 6.1), for which Orca (Max) reserves memory.",
    "- The rates of P fig. 13, 2 and 30 requests per second.",
    "- Savings of 55.2 % of the blocks by six beams (P 6.3), only where [figure 14 changes one"
    " assumption at a time](evaluation-assumptions.md#figure-14-one-assumption-at-a-time).",
    "- Tens of microseconds for a call of PyTorch (T 4.6.2), here 20.",
    "- A staging queue of eight requests (T 4.5.3).",
    "Two more inputs are in no text: how sure the candidates of beams are, 0.8, and in which share"
    " of the positions beams have the same ones, 0.9. The pair is one of six that"
    " `benchmarks/memory/sharing.py` compares with the published savings. So the savings of beams"
    " show that such a pair exists, and do not predict it.",
)
CLAIMS_MEASURED = (
    "`python -m benchmarks.paper.measured` runs the same mechanisms on this machine's CPU, with no"
    " simulation: paging and reservation, samples and beams, prefixes, preemption, and block sizes."
    " [Paging and reserving, measured](evaluation-memory.md#paging-and-reserving-measured) has"
    " results of `python -m benchmarks.paper.real`."
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
        ("fig_1", "table_1", "fig_2_13", "real", "fig_18a", "fig_18b"),
    ),
    Page(
        "evaluation-latency.md",
        "Evaluation: latency against rate",
        "Which rate of requests each system sustains, for three models and two workloads.",
        ("fig_12", "trace_lengths"),
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
            "block_tables",
            "execution_modes",
            "speculation",
            "replicas",
            "fidelity",
        ),
    ),
    Page(
        "evaluation-assumptions.md",
        "Evaluation: assumptions",
        "What five figures become when one assumption changes, and where the host's time comes"
        " from.",
        ("assumptions",),
    ),
)
STANDINGS = {
    VALUE: "the band lies around the published number",
    ORDER: "the text gives an order, a limit or a trend",
    MISSED: "the number cannot follow from the texts; its row gives the reason",
}


def pages_of(made: dict[str, list[Figure]]) -> dict[str, str]:
    """Return the text of all pages by file name. made: the figures of each module."""
    texts = {OVERVIEW: _overview(made), CLAIMS: _claims(made)}
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
    lines += ["| figure | what | quire | paper | shows |", "|---|---|---|---|---|"]
    for page in PAGES:
        for figure in _figures(made, page):
            for finding in figure.findings:
                if finding.published:
                    ours = f"{shown(finding.ours)}{finding.unit}"
                    link = f"[{figure.source.split(',')[0]}]({page.name})"
                    cells = (link, finding.what, ours, finding.published, finding.standing)
                    lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Pages", ""]
    for page in PAGES:
        link = f"[{page.name.removesuffix('.md')}]({page.name})"
        lines.append(wrapped(f"- {link}: {page.about}", "  "))
    lines += ["", "## How the figures are made", ""]
    for paragraph in METHOD:
        lines += [wrapped(paragraph), ""]
    return "\n".join(lines)


def _claims(made: dict[str, list[Figure]]) -> str:
    """Return the page with a line for each claim of the texts' figures and tables."""
    found = [
        (page, module, figure, finding)
        for page in PAGES
        for module in page.modules
        for figure in made.get(module, [])
        for finding in figure.findings
        if finding.standing in STANDINGS
    ]
    counts = {standing: _num(found, standing) for standing in STANDINGS}
    lines = [MARK, "# The papers, claim by claim", "", wrapped(f"{CLAIMS_INTRODUCTION} {LEGEND}")]
    lines += ["", "| shows | lines | what that means |", "|---|---|---|"]
    lines += [f"| {name} | {counts[name]} | {text} |" for name, text in STANDINGS.items()]
    own = sum(finding.standing not in STANDINGS for figures in made.values() for figure in figures
              for finding in figure.findings)  # fmt: skip
    lines += ["", wrapped(CLAIMS_OWN.format(num=own)), "", "## Not reproduced", ""]
    lines += [
        wrapped(
            f"- {figure.source.split(',')[0]}, {lowered(finding.what)}: {_ours(finding)}, published"
            f" {finding.published}. Reason: {finding.why}.",
            "  ",
        )
        for _, _, figure, finding in found
        if finding.standing == MISSED
    ]
    lines += ["", "## All claims", "", wrapped(CLAIMS_COLUMNS), ""]
    lines += ["| where | what | published | quire | shows | module |", "|---|---|---|---|---|---|"]
    for page, module, figure, finding in found:
        link = f"[{figure.source.split(',')[0]}]({page.name})"
        cells = (link, finding.what, finding.published, _ours(finding), finding.standing,
                 f"`{module}`")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", wrapped(CLAIMS_DRAWINGS), "", "## Inputs", ""]
    for paragraph in CLAIMS_INPUTS:
        is_last_item = paragraph == CLAIMS_INPUTS[-2]
        lines += [wrapped(paragraph, "  " if paragraph.startswith("- ") else "")]
        lines += [] if paragraph.startswith("- ") and not is_last_item else [""]
    lines += ["## Measured", "", wrapped(CLAIMS_MEASURED), "", *measured_lines()]
    return "\n".join(lines)


def measured_lines(folder: Path = FOLDER) -> list[str]:
    """Return a table of the newest results of `benchmarks.paper.measured`; nothing without any."""
    if not any(folder.glob(f"*/{MEASURED}.json")):
        return []
    found = newest(MEASURED, folder)
    machine = f"{found.machine['cpu']}, {found.machine['cores']} cores"
    text = f"Results of {machine}, {found.date[:10]}, commit {found.commit}."
    if "limit_gb_per_s" in found.settings:
        reading, products = (found.settings[f"limit_{name}_per_s"] for name in ("gb", "gflop"))
        text += f" It reads {reading:.0f} GB/s and does {products:.0f} GFLOP/s."
    lines = [wrapped(text), ""]
    lines.append("| group | case | tokens/s | rows in a step | saved | cached | preemptions |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in found.rows:
        cells = (
            row["group"], row["case"], shown(row["tokens_per_s"]), shown(row["batched"]),
            f"{row['saved']:.1%}", f"{row['cached']:.1%}", f"{row['preemptions']}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _num(found: Sequence[tuple[Page, str, Figure, Finding]], standing: str) -> int:
    return sum(finding.standing == standing for *_, finding in found)


def _ours(finding: Finding) -> str:
    return f"{shown(finding.ours)}{finding.unit}"
