"""The pages of numbers, and the rows of their overview."""

from benchmarks.numbers.cpu import AVX2, ENGINES, KERNELS
from benchmarks.numbers.gpu import GPU
from benchmarks.numbers.kv_cache import KV_CACHE
from benchmarks.numbers.models import MODELS, TRAINING
from benchmarks.numbers.page import ZEN4, ZEN5, Highlight, Page, Value
from benchmarks.numbers.scheduler import SCHEDULER
from benchmarks.numbers.server import SERVER

PAGES: tuple[Page, ...] = (
    ENGINES,
    AVX2,
    KERNELS,
    MODELS,
    TRAINING,
    SCHEDULER,
    KV_CACHE,
    SERVER,
    GPU,
)
OURS = ("quire bf16", "quire int8", "quire int4")
OPENVINO = ("openvino fp16", "openvino int8", "openvino int4")
LLAMA = ("llama.cpp bf16", "llama.cpp q8_0", "llama.cpp q4_0")
VLLM = ("vllm bf16", "vllm int8", "vllm int4")
DECODE = {"what": "decode", "model": "llama-3.1-8b", "context": 512}
STEP = {"load": "steady", "rows": 1024, "spread": True, "prefix_caching": True}


def of(file: str, figure: str, engines: tuple[str, ...], form: str) -> tuple[Value, ...]:
    """Return the best rounds of engines on the EPYC."""
    cell = "{best:" + form + "}"
    return tuple(Value(ZEN4 + file, cell, {"engine": e, "figure": figure}) for e in engines)


HIGHLIGHTS = (
    Highlight("16 requests at once, tokens/s (bf16, int8, int4)", ENGINES,
        of("cpu.json", "batch_rate", OURS, ".0f"),
        of("cpu.json", "batch_rate", OPENVINO, ".0f"), "OpenVINO"),
    Highlight("one request, tokens/s", ENGINES,
        of("cpu.json", "decode_rate", OURS, ".1f"),
        of("cpu.json", "decode_rate", LLAMA, ".1f"), "llama.cpp"),
    Highlight("16 requests with a new shared prefix, tokens/s", ENGINES,
        of("cpu_others.json", "cold_rate", OURS, ".0f"),
        of("cpu_others.json", "cold_rate", VLLM, ".0f"), "vLLM"),
    Highlight("prompt of 8,192 tokens, tokens/s", ENGINES,
        of("cpu_long.json", "long_rate", OURS, ".0f"),
        of("cpu_long.json", "long_rate", OPENVINO, ".0f"), "OpenVINO"),
    Highlight("seconds from the command to a first token", ENGINES,
        of("cpu_others.json", "start_s", OURS, ".2f"),
        of("cpu_others.json", "start_s", LLAMA, ".2f"), "llama.cpp"),
    Highlight("seconds from an image of 1,024 x 1,024 pixels to a first token, 2B model", ENGINES,
        of("cpu_images.json", "image_ttft_s", OURS[:1], ".1f"),
        of("cpu_images.json", "image_ttft_s", OPENVINO[:1], ".1f"), "OpenVINO"),
    Highlight("memory above weights and KV in bf16, MiB", ENGINES,
        (Value(ZEN4 + "cpu.json", "{median:.0f}",
            {"engine": "quire bf16", "figure": "above_mib"}),),
        (Value(ZEN4 + "cpu.json", "{median:.0f}",
            {"engine": "llama.cpp bf16", "figure": "above_mib"}),
         Value(ZEN4 + "cpu.json", "{median:,.0f}",
            {"engine": "openvino fp16", "figure": "above_mib"})), "llama.cpp, OpenVINO"),
    Highlight("int8 weights: accuracy of the demo model, points", MODELS,
        (Value(ZEN5 + "accuracy.json", "{tasks.all.points:+.2f}",
            {"model": "demo", "against": "bfloat16", "format": "int8"}),), (), "bf16 is 0"),
    Highlight("draft tokens for repeated text, times plain speed", MODELS,
        (Value(ZEN5 + "cpu_drafts_bf16.json", "{ratio:.1f}",
            {"engine": "quire bf16", "variant": "suffix 24"}),),
        (Value(ZEN5 + "cpu_drafts_bf16.json", "{ratio:.1f}",
            {"engine": "llama-server bf16", "variant": "spec-default 64"}),), "llama-server"),
    Highlight("a scheduler step of 1,024 rows, ms", SCHEDULER,
        (Value(ZEN5 + "steps.json", "{ms.schedule + update.median:.2f}", STEP),),
        (Value(ZEN5 + "steps.json", "{vllm_ms.schedule + update.median:.2f}", STEP),),
        "vLLM 0.32"),
    Highlight("idle time of a device with steps of 5 ms, two plans in flight", SCHEDULER,
        (Value(ZEN5 + "async_scheduling.json", "{idle:.1%}",
            {"path": "server", "rows": 1024, "step_ms": 5, "depth": 2}),),
        (Value(ZEN5 + "async_scheduling.json", "{idle:.1%}",
            {"path": "server", "rows": 1024, "step_ms": 5, "depth": 1}),), "one plan"),
    Highlight("mistakes in scheduler, KV cache and sampler that tests detect", SCHEDULER,
        (Value(ZEN4 + "mutation.json", "{share:.1%}"),), (), "the aim is 97 %"),
    Highlight("slots in allocated blocks that hold live tokens", KV_CACHE,
        (Value(ZEN5 + "live_slots.json", "{live_share:.1%}",
            {"workload": "ShareGPT-like", "block_size": 16}),), (), "the paper reports 96.3 %"),
    Highlight("16 requests that share 512 prompt tokens, times as fast", KV_CACHE,
        (Value(ZEN5 + "prefix_sharing.json", "{ratio:.2f}", {"side": "sharing"}),),
        (Value(ZEN5 + "prefix_sharing.json", "{limit:.2f}", {"side": "sharing"}),), "the limit"),
    Highlight("fork a request of 32,767 tokens, ms", KV_CACHE,
        (Value(ZEN4 + "fork.json", "{add_ms:.2f}", {"case": "forked, 1"}),),
        (Value(ZEN4 + "fork.json", "{settings.limit_ms:.2f}", {"case": "forked, 1"}),),
        "copying the token ids"),
    Highlight("first token after a hand-over of 2,048 tokens, s", SERVER,
        (Value(ZEN4 + "handover.json", "{warm_s:.2f}"),),
        (Value(ZEN4 + "handover.json", "{cold_s:.1f}"),), "computing the prompt"),
    Highlight("start of `quire serve` to the first text, s", SERVER,
        (Value(ZEN5 + "startup.json", "{start_s:.2f}", {"part": "server"}),), (),
        "the aim is 4 s"),
    Highlight("wrong answers while processes are killed", SERVER,
        (Value(ZEN5 + "chaos.json", "{num_wrong} of {num_answers:,}"),), (), "the aim is 0"),
    Highlight("Llama-3.1-8B on an H200, a step of one row, ms", GPU,
        (Value("h200/gpu_engine.json", "{mean_ms:.2f}", DECODE | {"rows": 1}),),
        (Value("h200/gpu_engine.json", "{limit_ms:.2f}", DECODE | {"rows": 1}),), "the limit"),
    Highlight("the same, a step of 64 rows, ms", GPU,
        (Value("h200/gpu_engine.json", "{mean_ms:.2f}", DECODE | {"rows": 64}),),
        (Value("h200/gpu_engine.json", "{limit_ms:.2f}", DECODE | {"rows": 64}),), "the limit"),
    Highlight("the same, a prompt of 2,048 tokens, ms", GPU,
        (Value("h200/gpu_engine.json", "{median_ms:.2f}",
            {"what": "prompt", "model": "llama-3.1-8b", "tokens": 2048}),),
        (Value("h200/gpu_engine.json", "{limit_ms:.2f}",
            {"what": "prompt", "model": "llama-3.1-8b", "tokens": 2048}),), "the limit"),
)  # fmt: skip
