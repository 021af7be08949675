"""Shared code of the drivers of images: their job, the timing of calls, the printed lines.

A job is a JSON object on the command line. Its fields are "model" (path), "workload" (name),
"is_small", "text" (of each prompt, after its image), "threads", "seed" and "options" of the engine.
Each printed line is one JSON object: {"workload", "metrics", "others", "texts"}. texts: the first
token of each answer, so that engines can be compared.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cpu.drivers.common import peak_rss_bytes
from benchmarks.cpu.images.workload import ImageWorkload, chosen_workload, random_pixels
from benchmarks.cpu.noise import Noise

VISION_START, VISION_END, IMAGE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"


@dataclass(frozen=True)
class ImageJob:
    """The work of one process."""

    model: Path
    workload: ImageWorkload
    text: str
    threads: int
    seed: int
    options: dict[str, Any]

    @classmethod
    def of(cls, line: str) -> "ImageJob":
        given = json.loads(line)
        workload = chosen_workload(given["workload"], given["is_small"])
        return cls(
            Path(given["model"]), workload, given["text"], given["threads"], given["seed"],
            given["options"],
        )  # fmt: skip


class ImageModel(Protocol):
    """A loaded model; greedy, no end-of-sequence token ends an answer."""

    def picture(self, pixels: bytes, side: int) -> Any:
        """Return a square image as the engine's users have it in memory."""

    def first_texts(self, pictures: list[Any]) -> list[str]:
        """Return the first token of the answer to each image, which the job's text follows."""


def measure(model: ImageModel, workload: ImageWorkload, seed: int) -> tuple[float, list[str]]:
    """Return the seconds from pictures in memory to their tokens, and the texts of these."""
    first = seed * workload.together
    pictures = [
        model.picture(random_pixels(workload.side, first + i), workload.side)
        for i in range(workload.together)
    ]
    began = time.perf_counter()
    texts = model.first_texts(pictures)
    elapsed_s = time.perf_counter() - began
    assert len(texts) == workload.together, f"{len(texts)} answers, not {workload.together}"
    return elapsed_s, texts


def emit(workload: ImageWorkload, elapsed_s: float, others: float, texts: list[str]) -> None:
    metrics = {"peak_mib": peak_rss_bytes() / 2**20}
    if workload.name == "first":
        metrics["image_ttft_s"] = elapsed_s
    else:
        metrics["images_rate"] = workload.together / elapsed_s
    line = {"workload": workload.name, "metrics": metrics, "others": others, "texts": texts}
    print(json.dumps(line), flush=True)


def drive(load: Callable[[ImageJob], ImageModel]) -> None:
    """Run a driver's main function. One image of full size warms up."""
    job = ImageJob.of(sys.argv[1])
    model, seed = load(job), job.seed * 1000
    model.first_texts([model.picture(random_pixels(job.workload.side, seed), job.workload.side)])
    for repeat in range(job.workload.repeats):
        noise = Noise()
        elapsed_s, texts = measure(model, job.workload, seed + 1 + repeat)
        emit(job.workload, elapsed_s, noise.others(), texts)
