"""T fig. 4.6: eager mode, piecewise and full CUDA graphs on an H100, by a model of time.

A step on one row takes the longer of the device's work and of the host's calls. Eager mode calls
each operation from PyTorch; piecewise graphs call attention alone, and each piece once; a full
graph is one call. The thesis gives the order of the modes and no times in its text.
"""

from benchmarks.paper.bands import ANY, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs
from benchmarks.result_files import newest

CALL_S = 20e-6  # one operation of PyTorch: "tens of microseconds" (T 4.6.2)
LAUNCH_S = 5e-6  # one graph
NUM_LAYERS = 32
LAYER_CALLS = 14  # two norms, four products, rotation, write, attention, gate, sums, reshapes
ATTENTION_CALLS = 2  # the write of keys and values, and attention
MODES = ("eager", "piecewise graphs", "full graph")


def host_s() -> list[float]:
    """Return the seconds of a step's calls in each mode."""
    eager = NUM_LAYERS * LAYER_CALLS * CALL_S
    piecewise = (NUM_LAYERS + 1) * LAUNCH_S + NUM_LAYERS * ATTENTION_CALLS * CALL_S
    return [eager, piecewise, LAUNCH_S]


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure for Llama-3.1-8B, whose work on a device was measured."""
    profiles = newest("gpu_engine").where(model="llama-3.1-8b", what="profile", step="1 x 512")
    busy_ms = float(profiles[0]["busy_ms"])
    host = [1e3 * each for each in host_s()]
    steps = [max(busy_ms, each) for each in host]
    eager, piecewise, full = steps
    findings = [
        order("piecewise graphs over a full graph", piecewise / full, 1.0, 1.1, "comparable",
              "a tenth more at most"),
        order("eager over piecewise graphs", eager / piecewise, 1.5, ANY, "significantly faster",
              "half more at least: the host takes most of an eager step"),
        order("host's calls in eager mode over the device's work", host[0] / busy_ms, 1.0, ANY,
              "a majority of the latency", "more than the device's work"),
    ]  # fmt: skip
    text = (
        f"By formula: {NUM_LAYERS} layers of {LAYER_CALLS} operations,"
        f" {1e6 * CALL_S:g} us for each call of PyTorch and {1e6 * LAUNCH_S:g} us for a graph. The"
        f" device's work, {busy_ms:.1f} ms, was measured on an H200 (`make gpu-check`). quire runs"
        " whole steps as one graph. The modes were not timed against each other on a GPU."
    )
    positions = [0.0, 1.0, 2.0]
    return [
        Figure(
            "execution_modes",
            "Eager mode and CUDA graphs, one row",
            "T 4.6.3, fig. 4.6",
            "",
            "ms of a step",
            [Curve("step", positions, steps), Curve("host's calls", positions, host)],
            findings,
            text,
            BARS,
            list(MODES),
        )
    ]
