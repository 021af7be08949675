"""The gain of paging, measured: quire's own engine with the paper's ways of reserving memory."""

from benchmarks.paper.bands import SHARE, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs
from benchmarks.result_files import newest

SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "quire")
RATIO = 4.3  # of requests in a step: an A100's in the paper


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make a figure of the last results of `benchmarks.paper.real`."""
    measured = newest("paper_real").rows
    models = list(dict.fromkeys(each["model"] for each in measured))
    rates = {(each["model"], each["system"]): each["tokens_per_s"] for each in measured}
    batched = {(each["model"], each["system"]): each["batched"] for each in measured}
    bar_positions = [float(index) for index in range(len(models))]
    findings = []
    for model in models:
        for other in ("Orca (Oracle)", "Orca (Max)"):
            ratio = rates[model, "quire"] / rates[model, other]
            more = batched[model, "quire"] / batched[model, other]
            findings.append(
                order(f"tokens/s over {other}, {model}", ratio, 1.0, more, "",
                      "more, and less than the ratio of requests in a step")
            )  # fmt: skip
        findings.append(
            order(f"requests in a step over Orca (Max), {model}", more, RATIO / (1 + SHARE),
                  RATIO * (1 + SHARE), "", f"a quarter to either side of the {RATIO} of fig. 13 a")
        )  # fmt: skip
    same = all(each["same_tokens"] for each in measured)
    text = (
        "Measured on two cores of a CPU, with a pool as small compared with the longest sequence as"
        " the paper's. One engine runs with the paper's ways of reserving memory before admission"
        " (`benchmarks/paper/reserving.py`), and as it is."
        f" {'All four gave the same tokens.' if same else 'Tokens differ!'} The gain of a larger"
        " batch depends on the machine: here reading the weights is only a part of a step."
    )
    return [
        Figure(
            "real",
            "Paging and reserving, measured",
            "P 6.2, on a CPU",
            "",
            "output tokens per second, as times Orca (Max)'s",
            [
                Curve(
                    system,
                    bar_positions,
                    [rates[model, system] / rates[model, "Orca (Max)"] for model in models],
                )
                for system in SYSTEMS
            ],
            findings,
            text,
            BARS,
            models,
        )
    ]
