"""transformers' `generate`, one static batch. options: dtype, cache (None, or static).

It has no prefix cache, so a known prefix is computed again.
"""

import importlib
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive


class Stream:
    """The streamer of `generate`, which gets the prompt first: notes the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


class TransformersModel:
    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job.threads)
        self._torch, self._cache = torch, job.options["cache"]
        self.kv_bytes = job.workload.num_tokens * job.workload.shape.kv_bytes_per_token
        if job.options["dtype"] == "float32":
            self.kv_bytes *= 2
        dtype = getattr(torch, job.options["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def _generate(self, prompts: Prompts, count: int, stream: Stream | None = None) -> int:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                cache_implementation=self._cache,
                streamer=stream,
            )
        return (out.shape[1] - ids.shape[1]) * len(prompts)

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        stream = Stream()
        self._generate([prompt], count, stream)
        return stream.times[1:]

    def batch(self, prompts: Prompts, count: int) -> int:
        return self._generate(prompts, count)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self.batch([prefix + each for each in own], count)


def import_engine() -> object:
    return importlib.import_module("transformers").AutoModelForCausalLM


if __name__ == "__main__":
    drive(import_engine, TransformersModel)
