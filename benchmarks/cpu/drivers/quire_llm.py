"""quire, through `LLM`. options: its settings, and `adapter`, the path of a GGUF file, if there is
one."""

import importlib
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive

SPARE_TOKENS = 1024


class QuireModel:
    def __init__(self, job: Job) -> None:
        from quire import LLM, LoRARequest, SamplingParams

        self._params, options = SamplingParams, dict(job.options)
        work, adapter = job.workload, options.pop("adapter", None)
        self._adapter = None if adapter is None else LoRARequest("adapter", 1, adapter)
        self.kv_bytes = work.num_tokens * work.shape.kv_bytes_per_token
        self._llm = LLM(
            str(job.model),
            device="cpu",
            max_model_len=work.max_len,
            max_num_seqs=work.num_requests,
            kv_cache_memory_bytes=self.kv_bytes + SPARE_TOKENS * work.shape.kv_bytes_per_token,
            disable_log_stats=True,
            **options,
        )

    def _greedy(self, count: int) -> object:
        return self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        times = []
        outputs = self._llm.stream(
            {"prompt_token_ids": prompt}, self._greedy(count), lora_request=self._adapter
        )
        for output in outputs:
            times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        return times

    def batch(self, prompts: Prompts, count: int) -> int:
        outputs = self._llm.generate(
            prompts, self._greedy(count), use_tqdm=False, lora_request=self._adapter
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self.batch([prefix + each for each in own], count)


def import_engine() -> object:
    return importlib.import_module("quire").LLM


if __name__ == "__main__":
    drive(import_engine, QuireModel)
