"""OpenVINO GenAI, with its `prompt_lookup`, which does not report the number of draft tokens.

No options.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cpu.drivers.drafting import PLAIN, Answer, Answerer, Job, Request, drive

CACHE_GB = 1
NGRAM = 3  # the longest run of tokens that is looked for, as in its samples


def answerer(pipeline: Any, num_drafts: int) -> Answerer:
    import numpy as np
    import openvino
    import openvino_genai

    class Stopwatch(openvino_genai.StreamerBase):  # type: ignore[misc]
        """When tokens came, and how many."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.counts: list[int] = []

        def write(self, tokens: Any) -> Any:
            self.times.append(time.perf_counter())
            self.counts.append(1 if isinstance(tokens, int) else len(tokens))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(request: Request) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.count
        config.do_sample = False
        if request.stop is None:
            config.ignore_eos = True
        else:
            config.eos_token_id = request.stop
        if num_drafts:
            config.num_assistant_tokens, config.max_ngram_size = num_drafts, NGRAM
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        watch = Stopwatch()
        result = pipeline.generate(ids, config, watch)
        token_ids = [int(token) for token in result.tokens[0]]
        seconds = watch.times[-1] - watch.times[0]
        return Answer.of(request, token_ids, seconds, 0, sum(watch.counts) - len(watch.counts))

    return answer


@contextmanager
def answerers(job: Job) -> Iterator[dict[str, Answerer]]:
    import openvino_genai

    found: dict[str, Answerer] = {}
    for num in (0, *job.guesses):
        name = f"prompt_lookup {num}" if num else PLAIN
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = 1
        properties = {"INFERENCE_NUM_THREADS": job.threads, "scheduler_config": scheduler}
        properties |= {"prompt_lookup": True} if num else {}
        pipeline = openvino_genai.LLMPipeline(str(job.model), "CPU", **properties)
        found[name] = answerer(pipeline, num)
    yield found


if __name__ == "__main__":
    drive(answerers)
