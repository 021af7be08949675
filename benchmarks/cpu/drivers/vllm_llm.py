"""vLLM's CPU build, step by step in this process. options: passed to `LLM`; and `adapter`, the
folder of an adapter in PEFT's form, if there is one.

It needs Intel's OpenMP and TCMalloc loaded first, and its threads bound. It does so itself only for
worker processes, and then keeps a core free for its scheduler: half of two cores. So this process
starts itself again with a worker's environment, on all requested cores. TCMalloc is skipped if the
system has none.
"""

import ctypes.util
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cpu.drivers.common import Job, Prompts, drive

KV_GIB = 2
PRELOAD = "LD_PRELOAD"


def variables(threads: int, python: Path) -> dict[str, str]:
    """Return the environment variables of the process that runs the model, by an interpreter."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    preloaded = [ctypes.util.find_library("tcmalloc_minimal"), str(openmp)]
    return {
        PRELOAD: ":".join(name for name in preloaded if name),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VLLMModel:
    def __init__(self, job: Job) -> None:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        self._params, options = SamplingParams, dict(job.options)
        adapter = options.pop("adapter", None)
        self._adapter = None if adapter is None else LoRARequest("adapter", 1, adapter)
        self.kv_bytes = KV_GIB << 30
        model = LLM(
            str(job.model),
            max_model_len=max(128, job.workload.max_len + 1),
            max_num_seqs=job.workload.num_requests,
            enable_prefix_caching=True,
            **options,
        )
        self._engine = model.llm_engine
        self._num_requests = 0

    def _steps(self, prompts: Prompts, count: int) -> Iterator[int]:
        """Yield the number of tokens after each step."""
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._num_requests += 1
            given = {"prompt_token_ids": prompt}
            name, adapter = str(self._num_requests), self._adapter
            self._engine.add_request(name, given, params, lora_request=adapter)
        lengths: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            yield sum(lengths.values())

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        times: list[float] = []
        for length in self._steps([prompt], count):
            times += [time.perf_counter()] * (length - len(times))
        return times

    def batch(self, prompts: Prompts, count: int) -> int:
        return list(self._steps(prompts, count))[-1]

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self.batch([prefix + each for each in own], count)


def import_engine() -> object:
    return importlib.import_module("vllm").LLM


if __name__ == "__main__":
    if PRELOAD not in os.environ:
        again = [sys.executable, "-m", "benchmarks.cpu.drivers.vllm_llm", *sys.argv[1:]]
        os.execve(
            sys.executable,
            again,
            os.environ | variables(Job.of(sys.argv[1]).threads, Path(sys.executable)),
        )
    drive(import_engine, VLLMModel)
