"""Tables of kernels, engines and models on CPUs."""

from benchmarks.numbers.engine import ZEN4, ZEN5
from benchmarks.numbers.page import Part, Section, Table

XEON = "xeon-amx-12/"
FIGURES = {
    "ttft_s": "first token, s", "decode_rate": "decode, tok/s",
    "prefill_rate": "prompt of 1,024, tok/s", "batch_rate": "16 rows, tok/s", "above_mib": "MiB",
}  # fmt: skip
SHARE = "{best:sig} ({share:.0%})"
STEP = {
    "step": "{step}", "ms": "{seconds*1e3:,.1f}", "limit, ms": "{limit_s*1e3:,.1f}",
    "GB": "{num_bytes*1e-9:.2f}",
}  # fmt: skip
WHOLE = {"operation": "all"}
OPERATIONS = {
    "operation": "{operation}", "ms": "{seconds*1e3:.2f}", "limit, ms": "{limit_s*1e3:.2f}"
}  # fmt: skip
CASES = {
    "case": "{case}", "variant": "{variant}", "threads": "{threads}",
    "layer, us": "{layer_us:,.0f}", "GB/s": "{kv_gb_per_s:.1f}", "of reading": "{of_reading:.0%}",
    "GFLOP/s": "{gflop_per_s:,.0f}", "of products": "{of_products:.0%}",
}  # fmt: skip


def engines(file: str, headings: dict[str, str], cell: str) -> Table:
    chosen = {"figure": tuple(headings)}
    return Table(ZEN4 + file, {"": "{engine}"}, chosen, "figure", cell, headings)


def guesses(file: str) -> Table:
    return Table(ZEN5 + file, {
        "task": "{task}", "engine": "{engine}", "way": "{variant}", "tokens/s": "{rate:,.1f}",
        "times plain": "{ratio:.2f}", "limit": "{limit}"})  # fmt: skip


def operations(folder: str, names: tuple[str, ...]) -> tuple[Table, ...]:
    return tuple(
        Table(f"{folder}operations_{name}.json", {name + ": step": "{step}"} | {
            heading: cell for heading, cell in STEP.items() if heading != "step"}, WHOLE)
        for name in names
    )  # fmt: skip


CPU = Part("On a CPU", (
    Section(
        "Beside other engines",
        "Qwen3-0.6B's shape with random weights, greedy, each engine from PyPI in an environment of"
        " its own, in alternating rounds. Best of the rounds, with the share of the limit that"
        " reading and arithmetic set, then the medians; MiB of memory are above weights and KV. The"
        " host moves this machine's two cores between one complex of cores and two, so the rate of"
        " reading changes by two within seconds.",
        "python -m benchmarks.cpu --rounds 5 --workloads single prefill batch",
        (
            engines("cpu.json", {k: v for k, v in FIGURES.items() if k != "above_mib"}, SHARE),
            engines("cpu.json", {k: v + ", median" for k, v in FIGURES.items()}, "{median:sig}"),
            Table(ZEN4 + "cpu.json", {"": "{engine}"}, {
                "engine": ("quire bf16", "quire int8", "quire int4", "quire int4 head int4"),
                "figure": ("ttft_s", "decode_rate", "prefill_rate", "batch_rate")},
                "figure", "{ratio:.2f} ({peer})",
                {k: v.rsplit(", ", 1)[0] + ", times the best peer" for k, v in FIGURES.items()
                 if k != "above_mib"}),
        ),
    ),
    Section(
        "Shared prefix, small model, start",
        "16 requests that share 512 of 544 prompt tokens, before anybody has seen the prefix and"
        " again, tokens/s; ms per token of an 8 M Llama; seconds from the command to a token.",
        "python -m benchmarks.cpu --rounds 1 --workloads start shared tiny",
        (engines("cpu_others.json", {
            "cold_rate": "shared, cold", "warm_rate": "shared, warm", "tiny_ms": "8 M model, ms",
            "start_s": "start, s"}, "{best:sig}"),),
    ),
    Section(
        "Long prompts",
        "A prompt of 8,192 tokens, and decoding after it, tokens/s and share of the limit.",
        "python -m benchmarks.cpu --rounds 2 --workloads long",
        (engines("cpu_long.json", {
            "long_rate": "prompt of 8,192", "deep_rate": "decode after it"}, SHARE),),
    ),
    Section(
        "64 rows",
        "64 requests of 128 tokens in and 64 out, tokens/s and share of the limit.",
        "python -m benchmarks.cpu --workloads rows",
        (engines("cpu_rows.json", {"rows_rate": "64 rows"}, SHARE),),
    ),
    Section(
        "Against transformers",
        "16 requests of 128 tokens against `generate` with a static batch (aim: 1.5 times). The"
        " limit is weights and products alone, at measured peaks.",
        "python -m benchmarks.models.against_transformers --dtype bfloat16",
        tuple(
            Table(f"{ZEN5}against_transformers_{dtype}.json", {
                dtype: "{engine}", "seconds": "{median_s:.2f}",
                "output tokens/s": "{output_tokens_per_s:.1f}", "times quire's time": "{ratio:.2f}",
                "limit, s": "{limit_s:.2f}"})
            for dtype in ("bfloat16", "float32")
        ),
    ),
    Section(
        "Throughput",
        "`quire bench throughput`: 16 requests of 128 tokens in and 64 out, bf16.",
        "python -m benchmarks.server.throughput --rounds 3",
        (Table(ZEN5 + "throughput.json", {
            "output tokens/s": "{output_tokens_per_second:.1f}", "all tokens/s":
            "{tokens_per_second:.0f}", "a decoding step":
            "{share_of_limits.decode_step_s*1e3:.1f} ms",
            "share of the limit": "{share_of_limits.of_limit:.0%}"}),),
    ),
    Section(
        "Beam search",
        "4 beams of 64 tokens against transformers (aims: 2 times for the demo model, 1 for the"
        " 0.6B shape), and bytes of keys and values.",
        "python -m benchmarks.models.beam_search",
        (Table(ZEN5 + "beam_search.json", {
            "model": "{model_id}", "dtype": "{dtype}", "prompts": "{num_prompts}", "tokens/s":
            "{tokens_per_second.quire:,.1f}", "times transformers": "{ratio:.2f}", "KV, MB":
            "{kv_bytes.quire*1e-6:.1f}", "of transformers": "{kv_bytes.transformers*1e-6:.1f}"}),),
    ),
    Section(
        "Where a step's time goes",
        "Whole steps by format (rows x context, or a prompt), and the operations of 16 rows in"
        " bf16. The limit is the longer of reading and arithmetic, at the peaks of the same run.",
        "python -m benchmarks.kernels.operations --quantization int8",
        (
            *operations(ZEN4, ("bf16", "int8", "int4")),
            Table(ZEN4 + "operations_bf16.json", OPERATIONS, {"step": "16x128"}),
            *operations(XEON, ("bf16", "int8", "int4")),
        ),
    ),
    Section(
        "Attention of one layer",
        "Microseconds of a layer in bf16, the rate of reading keys and values next to that of plain"
        " reading,"
        " and that of products next to what the instructions give. Below: blocks of 16 against one"
        " block of a whole row, contexts cut for several threads or not, a shared prefix read once"
        " or for each row.",
        "python -m benchmarks.kernels.attention",
        (
            Table(ZEN4 + "attention.json",
                {k: v for k, v in CASES.items() if k != "variant"}, {"part": "cases"}),
            Table(ZEN4 + "attention.json", {
                "case": "{case}", "way": "{way}", "us": "{layer_us:,.0f}", "other": "{other}",
                "its us": "{other_us:,.0f}", "times": "{ratio:.2f}", "of reading":
                "{of_reading:.0%}"}, {"part": ("paged", "split", "cascade")}),
            Table(ZEN4 + "attention.json", {
                "case": "{case}", "format": "{format}", "us": "{layer_us:,.0f}", "of reading":
                "{of_reading:.0%}", "GFLOP/s": "{gflop_per_s:,.0f}"}, {"part": "formats"}),
            Table(XEON + "attention.json", CASES, {"part": "cases"}),
        ),
    ),
    Section(
        "Products",
        "Microseconds of a layer's products by rows, then a CPU with AMX: GB/s of one row and 10^9"
        " operations/s of more, with the share of the peak.",
        "python -m benchmarks.kernels.linear",
        (
            Table(ZEN5 + "linear.json", {"shape": "{shape}", "format": "{format}"},
                {"rows": (1, 16, 64, 1024), "shape": ("gate_up", "head")}, "rows",
                "{seconds*1e6:,.0f}"),
            Table("xeon-amx-16/linear.json", {
                "shape": "{shape}", "format": "{format}", "variant": "{variant}"},
                {"rows": (16, 1024)}, "rows", "{gop_per_s:,} ({share:.0%})"),
            Table("xeon-amx-16/linear.json", {
                "shape": "{shape}", "format": "{format}", "variant": "{variant}", "GB/s of one row":
                "{gb_per_s} ({share:.0%})"}, {"rows": 1}),
        ),
    ),
    Section(
        "Several ranks",
        "Two cores that all ways share: tokens/s of Qwen3-0.6B's shape in bf16, and the share of"
        " tokens that are those of one process (stages have other random weights).",
        "python -m benchmarks.models.ranks",
        (Table(ZEN5 + "ranks.json", {
            "": "{way}", "start, s": "{start_s:.1f}", "1 row": "{decode_1:.1f}", "16 rows":
            "{decode_16:.0f}", "a prompt of 700": "{prompt:.0f}", "equal": "{equal:.0%}"}),),
    ),
    Section(
        "Sums over ranks",
        "Microseconds to add float32 [tokens, 1024] over two processes.",
        "python -m benchmarks.kernels.collective",
        (Table(ZEN5 + "collective.json", {"": "{kind}"}, by="tokens", cell="{us:,.0f}",
            headings={n: f"{n:,} tokens" for n in (1, 16, 256, 2048)}),),
    ),
))  # fmt: skip

MODELS = Part("Models and formats", (
    Section(
        "Accuracy",
        "The demo model on 2,000 held-out items of each of seven kinds, in each format against bf16"
        " (bf16 against float32): the relative error of logits, perplexity, nats per token, and"
        " points of accuracy with their 95 % interval. int4 is measured again"
        " in the second table.",
        "python -m benchmarks.models.accuracy",
        tuple(
            Table(file, {
                "format": "{format}", "against": "{against}", "logits": "{logits.relative:.1%}",
                "perplexity": "{text.all.perplexity:.4f}", "nats": "{text.all.difference:+.5f}",
                "points": "{tasks.all.points:+.2f}", "from": "{tasks.all.interval@min:+.2f}",
                "to": "{tasks.all.interval@max:+.2f}"},
                {"model": "demo", "against": against, "format": formats})
            for file, against, formats in (
                (ZEN5 + "accuracy.json", ("bfloat16", "float32"), ("bfloat16",)),
                (ZEN5 + "accuracy.json", "bfloat16", ("int8", "int8 rows", "fp8", "int8 KV")),
                (ZEN4 + "accuracy_int4.json", "bfloat16", ("int4", "int4 of 128",
                                                           "int4, head int4")),
            )
        ),
    ),
    Section(
        "Classes of transformers",
        "The share of the speed of quire's own class, for the same weights (aim: 0.8).",
        "python -m benchmarks.models.model_impl --rounds 3",
        (Table(ZEN5 + "model_impl.json", {"workload": "{workload}"}, by="way",
            cell="{tokens_per_s:.1f} ({share:.2f})"),),
    ),
    Section(
        "Layers with states",
        "The delta rule of one layer. The limit is the rate of copying memory.",
        "python -m benchmarks.kernels.states",
        (Table(ZEN5 + "states.json", {
            "case": "{case}", "us": "{delta_rule_us:,}", "GB/s":
            "{gb_per_s@min} to {gb_per_s@max}", "of copying": "{settings.copy_gb_per_s}",
            "GFLOP/s": "{gflop_per_s}"}),),
    ),
    Section(
        "Drafts compared with other engines",
        "Tokens/s of one row after its first token, and times the same engine without drafts (aims"
        " in `repeated`: 2 in bf16, 1.6 in int8). The limit: all drafts are right.",
        "make bench-guesses",
        tuple(guesses(f"cpu_guesses_{name}.json") for name in ("bf16", "int8", "demo")),
    ),
    Section(
        "Nothing to draft",
        "Times the plain speed where text does not repeat itself (aim: 0.98), and where it is"
        " copied.",
        "python -m benchmarks.models.speculation",
        tuple(
            Table(f"{ZEN5}speculation_{name}.json", {
                f"{name}: workload": "{workload}", "rows": "{rows}", "times": "{ratio:.2f}",
                "drafted": "{tried}", "right": "{right}"})
            for name in ("bf16", "demo")
        ),
    ),
))  # fmt: skip
