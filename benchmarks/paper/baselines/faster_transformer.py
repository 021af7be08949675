"""FasterTransformer with a dynamic batcher, as the paper has it (P 6.1): batches of requests.

Up to B of the oldest requests are computed together, from their prompts, padded to the longest, to
the end of the longest answer. No request joins meanwhile, and answers are given at the end of the
batch. B is the largest number that fits the memory if all sequences have the model's full length.
"""

from typing import Any

import numpy as np

from benchmarks.paper.baselines.core import BaselineCore, Job
from quire.tools.step_times import StepLoad

NUM_PARTS = 100  # of a batch's time, in which its tokens are recorded


class FasterTransformerCore(BaselineCore):
    """One batch at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.max_num_sequences = self.num_slots // self.max_model_len
        self._batch: list[Job] = []

    def problem(self, job: Job) -> str:
        if job.num > self.max_num_sequences:
            return f"{job.num} sequences are more than a batch, {self.max_num_sequences}"
        return super().problem(job)

    def begin(self, now: float) -> float | None:
        num_seqs = 0
        while self.queue and num_seqs + self.queue[0].num <= self.max_num_sequences:
            job = self.queue.popleft()
            num_seqs += job.num
            self.admit(job, now)
            self._batch.append(job)
        if not self._batch:
            return None
        lasts_s = self._batch_seconds(num_seqs)
        self._count_tokens(now, lasts_s)
        self.batches.busy_s += lasts_s
        self.batches.requests_s += lasts_s * len(self._batch)
        if self.queue:
            self._note_memory(lasts_s)
        return now + lasts_s

    def end(self, now: float) -> None:
        for job in self._batch:
            self.finish(job, now)
        self._batch.clear()

    def _batch_seconds(self, num_seqs: int) -> float:
        prompt = max(job.num_prompt for job in self._batch)
        num_steps = max(job.num_output for job in self._batch)
        pairs = prompt * (prompt + 1) // 2
        tokens = len(self._batch) * prompt
        first_s = self.seconds(StepLoad(tokens, tokens, len(self._batch) * pairs, num_seqs))
        # Steps differ in their context alone, and take longer evenly: the mean is the middle one's.
        context = num_seqs * prompt + num_seqs * num_steps // 2
        middle_s = self.seconds(StepLoad(num_seqs, context, context, num_seqs))
        return first_s + (num_steps - 1) * middle_s

    def _count_tokens(self, now: float, lasts_s: float) -> None:
        """Record the tokens of a batch, spread evenly over its time."""
        total = sum(job.num * job.num_output for job in self._batch)
        for part in range(1, NUM_PARTS + 1):
            tokens = total * part // NUM_PARTS - total * (part - 1) // NUM_PARTS
            self.listener.tokens.append((now + lasts_s * part / NUM_PARTS, tokens))

    def _note_memory(self, lasts_s: float) -> None:
        """Note what the memory holds on the mean over a batch."""
        num_steps = max(job.num_output for job in self._batch)
        steps = np.arange(num_steps)
        live = sum(
            job.num * (job.num_prompt + float(np.minimum(steps, job.num_output).mean()))
            for job in self._batch
        )
        promised = sum(job.num * job.num_tokens for job in self._batch)
        reserved = sum(job.num for job in self._batch) * self.max_model_len
        self.batches.memory.add(live, promised, reserved, self.num_slots, lasts_s)
