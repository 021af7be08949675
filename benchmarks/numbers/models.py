"""Tables of models, formats and draft tokens."""

from benchmarks.numbers.cpu import FIGURES, MEDIAN, engines
from benchmarks.numbers.page import ZEN3, ZEN4, ZEN5, Page, Section, Table


def drafts(name: str, *tasks: str) -> Table:
    return Table(f"{ZEN5}cpu_drafts_{name}.json", {
        "task": "{task}", "engine": "{engine}", "drafts": "{variant}", "tokens/s": "{rate:,.1f}",
        "times plain": "{ratio:.2f}", "limit": "{limit}"},
        {"task": tasks} if tasks else {})  # fmt: skip


FORMATS = {
    "format": "{format}", "compared with": "{against}", "error of logits": "{logits.relative:.1%}",
    "perplexity": "{text.all.perplexity:.4f}", "nats per token": "{text.all.difference:+.5f}",
    "accuracy, points": "{tasks.all.points:+.2f}",
    "95 % interval": "{tasks.all.interval@min:+.2f} to {tasks.all.interval@max:+.2f}",
}  # fmt: skip
BATCHES = (1, 2, 4, 8, 12, 16)


SPECULATED: tuple[dict[str, str], dict[str, str], str, str] = (
    {"rows": "{workload}"}, {}, "rows", "{ratio:.2f} ({low:.2f} to {high:.2f})"
)  # fmt: skip
SPECULATION = (
    Section(
        "Draft tokens by workload",
        "Times the plain speed of the demo model with the method `suffix`, and the 95 % interval of"
        " the median of pairs. Cells with fewer than six pairs show the range of all. Tool calls"
        " and JSON have a grammar. The aims: no cell below 0.99, and 1.5 for tool calls and JSON"
        " with one row.",
        "python -m benchmarks.models.speculation",
        (Table(ZEN3 + "speculation_demo.json", *SPECULATED),),
    ),
    Section(
        "Draft tokens of a larger model",
        "The same with Qwen3-0.6B's shape in bf16. Its drafts are accepted as those of the demo"
        " model were, place by place. Making masks is not part of it. 64 and 256 rows would take"
        " longer than the seven minutes of a run.",
        "python -m benchmarks.models.speculation --replay shape:qwen3-0.6b --minutes 7"
        " --kv-mib 1024",
        (Table(ZEN3 + "speculation_replay.json", *SPECULATED),),
    ),
)
MODELS = Page("models.md", "Models, formats and drafts", (
    Section(
        "Accuracy of formats",
        "The demo model on 2,000 held-out items of each of seven tasks, in each format compared"
        " with bf16 (bf16 with float32).",
        "python -m benchmarks.models.accuracy",
        (
            Table(ZEN5 + "accuracy.json", FORMATS, {
                "model": "demo", "against": "float32", "format": "bfloat16"}),
            Table(ZEN5 + "accuracy.json", FORMATS, {
                "model": "demo", "against": "bfloat16",
                "format": ("int8", "int8 rows", "fp8", "int8 KV")}),
            Table(ZEN4 + "accuracy_int4.json", FORMATS, {
                "model": "demo", "against": "bfloat16",
                "format": ("int4", "int4 of 128", "int4, head int4")}),
        ),
    ),
    Section(
        "Classes of transformers",
        "Tokens/s of the same weights by quire's own class and by transformers' class, and the"
        " share of the former. The aim: 0.8.",
        "python -m benchmarks.models.model_impl --rounds 3",
        (Table(ZEN5 + "model_impl.json", {"workload": "{workload}"}, by="way",
            cell="{tokens_per_s:.1f} ({share:.2f})"),),
    ),
    Section(
        "Draft tokens for repeated text",
        "Tokens/s of one row after its first token, and times the same engine without drafts. The"
        " aims: 2 times in bf16, 1.6 times in int8. At the limit every draft token is accepted.",
        "make bench-guesses",
        (drafts("bf16"), drafts("int8")),
    ),
    Section(
        "Draft tokens of the demo model",
        "The same for texts that copy their prompt, call tools, or write JSON.",
        "make bench-guesses",
        (drafts("demo"),),
    ),
    *SPECULATION,
), "How exact each weight format is, and what draft tokens gain.")  # fmt: skip

WITH_ADAPTER = {name: FIGURES[name] for name in ("ttft_s", "decode_rate", "prefill_rate")}

TRAINING = Page("training.md", "Adapters and training", (
    Section(
        "Adapters",
        "What adapters of rank 16 in all linear layers add to a decoding step of Qwen3-0.6B's"
        " shape, one row and 128 tokens of context for each adapter. The limit is the time to read"
        " their matrices at the measured bandwidth; the aim is 1.5 times the limit. The second"
        " table: the same rows without adapters, by an engine with `enable_lora` and by one"
        " without; the aim is 1 % more. A matrix of an adapter has 32 to 96 KB, and two threads"
        " read such short pieces at about half the bandwidth of long ones. One phase per layer"
        " instead of two, prefetching whole matrices, and reading four lines at once changed this"
        " by less than the noise.",
        "python -m benchmarks.models.adapters",
        tuple(
            table
            for name in ("bf16", "int8")
            for table in (
                Table(f"{ZEN3}adapters_{name}.json", {
                    f"{name}: adapters": "{adapters}", "step, ms": "{step_s*1e3:.1f}",
                    "adapters' part, ms": "{adapters_s*1e3:.1f}", "limit, ms": "{limit_s*1e3:.1f}",
                    "times the limit": "{ratio:.2f}"},
                    {"adapters": (1, 4, 16, 64)}),
                Table(f"{ZEN3}adapters_{name}.json", {
                    f"{name}: without adapters": "{step}", "plain, ms": "{plain_s*1e3:.1f}",
                    "enable_lora, ms": "{adapted_s*1e3:.1f}", "ratio": "{ratio:.3f}"},
                    {"aim": 1.01}),
            )
        ),
    ),
    Section(
        "One adapter, compared with other engines",
        "Qwen3-0.6B's shape with one adapter of rank 16 in all linear layers: the first token of a"
        " prompt of 128, decoding, and a prompt of 1,024; medians of alternating rounds with the"
        " share of the base model's limit. vLLM computes in float32; its prompt of 1,024 took"
        " longer than 150 s. The second table compares best rounds.",
        "python -m benchmarks.cpu.adapters --rounds 2",
        (
            engines("cpu_adapters.json", WITH_ADAPTER, MEDIAN, ZEN3),
            engines("cpu_adapters.json", WITH_ADAPTER, "{ratio:.2f} ({peer})", ZEN3,
                engine=("quire bf16", "quire q4_0")),
        ),
    ),
    Section(
        "Loading an adapter while others stream",
        "Milliseconds between two outputs of four streams of Qwen3-0.6B's shape in bf16, when a"
        " request arrives whose adapter of 50 MB is loaded first, and when one without an adapter"
        " arrives. The aim: at most 20 ms more.",
        "python -m benchmarks.models.adapter_load",
        (Table(ZEN3 + "adapter_load.json", {
            "round": "{round}", "arrival": "{arrival}", "usual, ms": "{median_ms:.0f}",
            "longest, ms": "{longest_ms:.0f}", "first token, ms": "{first_token_ms:,.0f}"},
            {"arrival": ("plain", "adapter")}),),
    ),
    Section(
        "Cost of training",
        "The trainer's forward pass alongside the engine's and transformers' (float32), and a whole"
        " step of training: CPU seconds of one thread, since other programs used the machine. An"
        " update gives the engine the trainer's tensors; a start opens an engine from the files."
        " The last table: the first update of an engine that started without torch imports it.",
        "python -m benchmarks.models.training --samples 8 --length 128 --pause",
        (
            Table(ZEN3 + "training.json", {
                "work": "{work}", "CPU s": "{cpu_s:.2f}", "tokens per CPU s":
                "{tokens_per_cpu_s:,.0f}", "log-probabilities unlike the engine's":
                "{settings.differ.trainer} of {settings.compared:,}"},
                {"work": ("trainer forward", "trainer step")}),
            Table(ZEN3 + "training.json", {
                "work": "{work}", "CPU s": "{cpu_s:.2f}"},
                {"work": ("engine forward", "torch forward", "torch step", "engine update",
                "engine start")}),
            Table(ZEN3 + "training.json", {
                "a stream during four updates": "{work}", "usual time between tokens, ms":
                "{gap_ms:.1f}", "longest in an update, ms": "{longest_ms@min:.0f} to"
                " {longest_ms@max:.0f}", "an update, s":
                "{update_s@min:.2f} to {update_s@max:.2f}"},
                {"work": "pause"}),
        ),
    ),
    Section(
        "Learning by GRPO",
        "The mean reward of the stories in a batch, and the KL between trainer and engine before"
        " the first and the second update ([training](../use/training-model.md)).",
        "python -m benchmarks.models.grpo --steps 17",
        (Table(ZEN3 + "grpo.json", {
            "batch": "{batch}", "reward": "{reward:.2f}", "KL before": "{kl_before:g}",
            "KL after": "{kl_after:.1e}", "tokens": "{num_tokens:,}", "CPU s": "{cpu_s:.0f}"},
            {"batch": BATCHES}),),
    ),
), "What adapters and training cost, and how a model learns.")  # fmt: skip
