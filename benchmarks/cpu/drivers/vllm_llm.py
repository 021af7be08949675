"""vLLM's CPU build, through `LLM`. options: dtype.

Times of single tokens are taken between two calls, of one token and of all, with other prompts.
"""

import importlib
import os
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive

KV_GIB = "2"


class VLLMModel:
    def __init__(self, job: Job) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_GIB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self.kv_bytes = int(KV_GIB) << 30
        self._llm = LLM(
            str(job.model),
            max_model_len=max(128, job.workload.max_len + 1),
            max_num_seqs=job.workload.num_requests,
            enable_prefix_caching=True,
            enforce_eager=True,
            **job.options,
        )

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        """As if the call that is asked for had followed the caller's clock."""
        began = time.perf_counter()
        self.batch([[token ^ 1 for token in prompt]], 1)
        first = time.perf_counter()
        if count == 1:
            return [first]
        self.batch([prompt], count)
        step_s = (time.perf_counter() - first - (first - began)) / (count - 1)
        return [first + i * step_s for i in range(count)]

    def batch(self, prompts: Prompts, count: int) -> int:
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self.batch([prefix + each for each in own], count)


def import_engine() -> object:
    return importlib.import_module("vllm").LLM


if __name__ == "__main__":
    drive(import_engine, VLLMModel)
