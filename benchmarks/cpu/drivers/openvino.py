"""OpenVINO GenAI's continuous batching, which is also what its LLMPipeline uses.

options: properties of the device.
"""

import importlib
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive

CACHE_GB = 2


class OpenVINOModel:
    def __init__(self, job: Job) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self._np, self._openvino, self._genai = np, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = job.workload.num_requests
        scheduler.enable_prefix_caching = True
        self.kv_bytes = None  # it does not say how much of the cache is in use
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(job.model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": job.threads, **job.options}
        )
        self._num_requests = 0

    def _add(self, prompt: list[int], count: int) -> object:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = count
        config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        ids = self._openvino.Tensor(self._np.array([prompt], self._np.int64))
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, ids, config)

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        handle, times = self._add(prompt, count), []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if handle.can_read():
                (output,) = handle.read().values()
                times += [time.perf_counter()] * len(output.generated_ids)
        return times

    def batch(self, prompts: Prompts, count: int) -> int:
        handles = [self._add(prompt, count) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        return self.batch([prefix + each for each in own], count)


def import_engine() -> object:
    return importlib.import_module("openvino_genai")


if __name__ == "__main__":
    drive(import_engine, OpenVINOModel)
