"""Tables of GPUs, of the papers' figures, and of attacks."""

from benchmarks.numbers.engine import ZEN4, ZEN5
from benchmarks.numbers.page import Part, Section, Table

H200 = "h200/"

GPU = Part("On a GPU", (
    Section(
        "Limits and answers",
        "What the device reaches by itself, and answers compared with a CPU's.",
        "make gpu-check PART=bench",
        (Table(H200 + "gpu_first.json", {
            "case": "{case}", "ms": "{seconds*1e3:.3f}", "measured limit, ms":
            "{measured_floor_s*1e3:.3f}", "GB/s": "{detail.GB/s}", "TFLOP/s": "{detail.TFLOP/s}",
            "answers": "{figure}", "aim": "{aim}"}),),
    ),
    Section(
        "Steps",
        "Random weights in bf16, two plans in flight, whole steps recorded. The limit is that of"
        " reading and arithmetic, at the rates above.",
        'PIECES="llama-8b qwen3-0.6b" bash .ci/gpu-check bench',
        (
            Table(H200 + "gpu_engine.json", {
                "model": "{model}", "rows": "{rows}", "context": "{context:,}", "mean, ms":
                "{mean_ms:.2f}", "tokens/s": "{tokens_per_s:,.0f}", "limit, ms": "{limit_ms:.2f}",
                "share": "{share:.0%}"}, {"what": "decode"}),
            Table(H200 + "gpu_engine.json", {
                "model": "{model}", "prompt": "{tokens:,}", "median, ms": "{median_ms:.2f}",
                "fastest": "{fastest_ms:.2f}", "limit, ms": "{limit_ms:.2f}", "share":
                "{share:.0%}"}, {"what": "prompt"}),
            Table(H200 + "gpu_engine.json", {
                "model": "{model}", "step": "{step}", "the GPU works, ms": "{busy_ms:.2f}", "of ms":
                "{span_ms:.2f}", "launches": "{launches}"}, {"what": "profile"}),
        ),
    ),
    Section(
        "Attention",
        "One layer that decodes, with nothing in the cache. The share is that of the device's own"
        " rate of reading.",
        "PIECES=attention bash .ci/gpu-check bench",
        (Table(H200 + "gpu_attention.json", {
            "model": "{model}", "rows": "{rows}", "context": "{context:,}", "us": "{cold_us}",
            "in the cache, us": "{warm_us}", "GB/s": "{kv_gb_per_s:,.0f}", "share":
            "{of_reading:.0%}"}),),
    ),
    Section(
        "Products of few rows",
        "Microseconds of the fastest tile of the kernel and of cuBLAS; the limit is reading the"
        " weight.",
        "PIECES=kernels bash .ci/gpu-check bench",
        (Table(H200 + "gpu_few_rows.json", {
            "model": "{model}", "product": "{product}", "rows": "{rows}", "limit": "{floor_us}",
            "cuBLAS": "{cublas_us}", "kernel": "{best_us}", "tile": "{best}"},
            {"rows": (1, 2, 4)}),),
    ),
    Section(
        "Host time of a step",
        "Microseconds of a decoding step's host work, without calls into CUDA; last the shortest"
        " step of Qwen3-0.6B on an H200, by formula.",
        "python -m benchmarks.scheduler.launching",
        (Table(ZEN5 + "launching.json", {
            "rows": "{rows}", "plan": "{us.schedule:.0f}", "pack and launch": "{us.launch:.0f}",
            "take the result": "{us.result:.0f}", "p99 of all": "{us.p99:.0f}", "a step":
            "{floor_us:,.0f}"}),),
    ),
), "Of a GPU little is measured: [The GPU page](../inside/gpu.md) says what is missing. "
   "`make gpu-check` measures it.")  # fmt: skip

PAPER = Part("The papers", (
    Section(
        "Figures",
        "[The evaluation](evaluation.md) has all figures with their bands. Here are those"
        " for which the paper gives a number.",
        "make paper",
        (Table("virtual-time/paper.json", {
            "figure": "{figure}", "what": "{what}", "here": "{ours:sig}{unit}", "paper":
            "{published}"}, {"row": "finding"}, is_full=True),),
    ),
    Section(
        "Paging, measured",
        "One engine in which only the way of reserving memory changes.",
        "python -m benchmarks.paper.real",
        (Table(ZEN4 + "paper_real.json", {
            "model": "{model}", "system": "{system}", "tokens/s": "{tokens_per_s:,.0f}",
            "requests in a step": "{batched:.1f}"}),),
    ),
    Section(
        "Simulations compared with real runs",
        "How far `quire simulate` is from runs that it has not seen. Aims: throughput 10 %, mean"
        " and median time to the first token 15 %.",
        "python -m benchmarks.scheduler.fidelity",
        (Table(ZEN5 + "fidelity.json", {
            "model": "{model}", "workload": "{workload}", "tokens/s": "{off.tokens/s:+.1%}",
            "TTFT, mean": "{off.TTFT mean:+.1%}", "median": "{off.TTFT median:+.1%}", "p99":
            "{off.TTFT p99:+.1%}"}),),
    ),
))  # fmt: skip

ROBUSTNESS = (
    Part("Under attack", (
        Section(
            "Chaos",
            "A server whose processes are killed or stopped every 20 s. Answers are compared with"
            " those of a quiet run.",
            "python -m tests.serve.chaos --minutes 20 --seed 20",
            (Table(ZEN5 + "chaos.json", {
                "answers": "{num_answers:,}", "wrong": "{num_wrong}", "cut with an error":
                "{num_cut:,}", "refused as busy": "{num_busy}", "left over": "{num_left_over}",
                "slowest /health": "{slowest_health_s} s"}),),
        ),
        Section(
            "The worst bodies",
            "Bodies of the largest permitted size, 16 MiB, until the prompt's length is judged:"
            " processor time (aim: 0.5 s), how long the event loop is held, and memory as times the"
            " size (aim: 4).",
            "python -m benchmarks.server.worst_bodies",
            (Table(ZEN5 + "worst_bodies.json", {
                "body": "{body}", "processor": "{cpu_s} s", "held": "{held_s} s", "memory":
                "{memory} times"}),),
        ),
    ), "[The table of attacks](../operate/robustness.md) is the table of what attacks found."),
    Part("Mutations", (
        Section(
            "Small mistakes that the tests see",
            "One small mistake at a time in the scheduler, the KV cache or the sampler, and the"
            " tests that call it (aim: 97 %). Mistakes that change nothing are listed in"
            " `tests/mutation/equivalent.txt`.",
            "make mutate",
            (Table(ZEN4 + "mutation.json", {
                "mistakes": "{num_mutations}", "seen": "{num_seen}", "share": "{share:.1%}"}),),
        ),
    )),
    Part("The code", (
        Section(
            "Code that one action runs",
            "The Python files whose functions run for one step of the scheduler with its result,"
            " one forward pass on a CPU, and one chat through HTTP; and the lines of these files.",
            "python -m benchmarks.scheduler.trips",
            (Table(ZEN4 + "trips.json", {
                "action": "{trip}", "files": "{files}", "lines": "{lines:,}"}),),
        ),
    )),
)  # fmt: skip
