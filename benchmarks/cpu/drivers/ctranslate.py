"""CTranslate2's Generator. options: compute_type.

A shared prefix is given as its static prompt, whose state it keeps from call to call.
"""

import importlib
import json
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive


class CTranslate2Model:
    def __init__(self, job: Job) -> None:
        import ctranslate2

        self.kv_bytes = None
        self._texts = json.loads((job.model / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(job.model), device="cpu", intra_threads=job.threads, **job.options
        )

    def _named(self, prompt: list[int]) -> list[str]:
        return [self._texts[token] for token in prompt]

    def _generate(self, prompts: Prompts, count: int, **more: object) -> int:
        results = self._generator.generate_batch(
            [self._named(prompt) for prompt in prompts],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            **more,
        )
        return sum(len(result.sequences_ids[0]) for result in results)

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        times = []

        def on_step(step: object) -> bool:
            times.append(time.perf_counter())
            return False

        self._generate([prompt], count, callback=on_step)
        return times

    def batch(self, prompts: Prompts, count: int) -> int:
        return self._generate(prompts, count)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self._generate(own, count, static_prompt=self._named(prefix))


def import_engine() -> object:
    return importlib.import_module("ctranslate2")


if __name__ == "__main__":
    drive(import_engine, CTranslate2Model)
