"""The engines that are compared by images, and how each gets its model."""

import shutil
from pathlib import Path

from benchmarks.cpu.engines import FLOAT16, OPENVINO, TORCH, Engine, Environment
from benchmarks.cpu.images.checkpoint import write_checkpoint
from benchmarks.cpu.images.workload import ImageShape
from benchmarks.cpu.preparation import Scratch

TRANSFORMERS_IMAGES = Environment("transformers-images", (TORCH, "transformers", "pillow"))
# The exporter of Qwen3-VL does not work with later transformers. The index's torchvision does not
# work with a torch for CPUs, and the exporter works without it.
OPENVINO_IMAGES_EXPORT = Environment(
    "openvino-images-export",
    ("optimum-intel[openvino]", "transformers>=4.57,<5.1", TORCH, "pillow"),
    unwanted=("torchvision",),
)
BFLOAT16 = {"dtype": "bfloat16"}
ENGINES = [
    Engine("quire bf16", "16-bit", "image_quire", FLOAT16, options=BFLOAT16),
    Engine(
        "transformers bf16", "16-bit", "image_hf", FLOAT16, TRANSFORMERS_IMAGES, options=BFLOAT16
    ),
    Engine("openvino fp16", "16-bit", "image_openvino", FLOAT16, OPENVINO, "openvino-fp16"),
]


def model_of(scratch: Scratch, engine: Engine, shape: ImageShape) -> Path:
    """Return an engine's form of a model, which is made if it is missing. Raises Unavailable."""
    models = scratch.directory / "models"
    config = models / shape.name / "config.json"
    before = config.read_bytes() if config.exists() else b""
    checkpoint = write_checkpoint(shape, models / shape.name)
    peer, _, kind = engine.source.partition("-")
    if peer == "checkpoint":
        return checkpoint
    target = models / f"{shape.name}-{engine.source}"
    if before != config.read_bytes() or not (target / "complete").exists():
        shutil.rmtree(target, ignore_errors=True)
        program = scratch.python(OPENVINO_IMAGES_EXPORT).parent / "optimum-cli"
        command = [str(program), "export", "openvino", "--model", str(checkpoint)]
        command += ["--task", "image-text-to-text", "--weight-format", kind, str(target)]
        scratch.run_tool(f"export-{target.name}", command)
        (target / "complete").touch()
    return target


def prepare(scratch: Scratch, engine: Engine, shapes: list[ImageShape]) -> None:
    """Make all that an engine needs. Raises Unavailable."""
    scratch.python(engine.environment)
    for shape in shapes:
        model_of(scratch, engine, shape)
