"""Orca as the paper has it (P 6.1): iteration-level batches, contiguous memory reserved ahead.

Requests are admitted in order of arrival, as soon as memory for all sequences of the next one is
available. Each sequence needs a chunk of a buddy allocator. The chunk has room for the prompt and
as many output tokens as the variant expects. Sequences of a request share no memory. A prompt is
computed in one step, together with a token of each running sequence (Orca's selective batching),
and once for all samples. No sequence is ever preempted, since all memory is there from the start.
"""

import heapq
from collections.abc import Callable
from typing import Any

from benchmarks.paper.baselines.buddy import BuddyAllocator
from benchmarks.paper.baselines.core import BaselineCore, Job
from quire.tools.step_times import StepLoad

Reserve = Callable[[Job, int], int]


def oracle(job: Job, max_model_len: int) -> int:
    """Reserve what will be needed, as if it were known."""
    return job.num_tokens


def pow2(job: Job, max_model_len: int) -> int:
    """Reserve for at most twice the output: for 25 tokens, 32."""
    return min(job.num_prompt + BuddyAllocator.rounded(job.num_output), max_model_len)


def longest(job: Job, max_model_len: int) -> int:
    """Reserve for the longest sequence that the model can have."""
    return max_model_len


class OrcaCore(BaselineCore):
    """reserve: how many slots a sequence gets. max_num_seqs: in a step. max_num_tokens: a step
    takes in no further prompt beyond these."""

    def __init__(
        self,
        *args: Any,
        reserve: Reserve,
        max_num_seqs: int,
        max_num_tokens: int,
    ) -> None:
        super().__init__(*args)
        self._reserve = reserve
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        self._memory = BuddyAllocator(self.num_slots)
        self._chunks: dict[str, list[int]] = {}
        self._ends: list[tuple[int, int, Job]] = []  # the step that ends each; a heap
        self._step = 0
        self._num_jobs = 0
        self._fresh: list[Job] = []  # whose prompt is in this step
        # Sums over all sequences: their tokens (with the one to compute next), their final tokens,
        # and their reserved tokens.
        self._num_seqs = self._context = self._promised = self._reserved = 0

    def problem(self, job: Job) -> str:
        if problem := super().problem(job):
            return problem
        chunk = BuddyAllocator.rounded(self._reserve(job, self.max_model_len))
        whole = BuddyAllocator(self.num_slots)
        fits = all(whole.allocate(chunk) is not None for _ in range(job.num))
        if not fits or job.num > self._max_num_seqs:
            return f"{job.num} chunks of {chunk} slots do not fit the memory"
        return ""

    def begin(self, now: float) -> float | None:
        num_prompt, num_pairs = self._take_in(now)
        if not self._num_seqs:
            return None
        num_old = self._num_seqs - sum(job.num for job in self._fresh)
        fresh = sum(job.num * job.num_prompt for job in self._fresh)
        context = self._context - fresh  # of the older sequences
        load = StepLoad(
            num_prompt + num_old,
            num_prompt + context,
            num_pairs + context,
            self._num_seqs,
        )
        lasts_s = self.seconds(load)
        batches = self.batches
        batches.busy_s += lasts_s
        batches.requests_s += lasts_s * (len(self._ends))
        if self.queue:
            batches.memory.add(
                self._context, self._promised, self._reserved, self.num_slots, lasts_s
            )
        return now + lasts_s

    def end(self, now: float) -> None:
        self._step += 1
        self.listener.tokens.append((now, self._num_seqs))
        self._context += self._num_seqs  # each got a token
        for job in self._fresh:
            job.served.first_token_s = now
        self._fresh.clear()
        while self._ends and self._ends[0][0] <= self._step:
            self._leave(heapq.heappop(self._ends)[2], now)

    def _take_in(self, now: float) -> tuple[int, int]:
        """Admit who fits; returns how many tokens of prompts and products of attention that is."""
        num_tokens = num_pairs = 0
        while self.queue:
            job = self.queue[0]
            if self._num_seqs + job.num > self._max_num_seqs:
                break
            if num_tokens and num_tokens + job.num_prompt > self._max_num_tokens:
                break
            slots = self._reserve(job, self.max_model_len)
            if not self._allocate(job, slots):
                break
            self.queue.popleft()
            self.admit(job, now)
            self._fresh.append(job)
            heapq.heappush(self._ends, (self._step + job.num_output, self._num_jobs, job))
            self._num_jobs += 1
            self._count(job, 1, job.num_prompt)
            num_tokens += job.num_prompt
            num_pairs += job.num_prompt * (job.num_prompt + 1) // 2
        return num_tokens, num_pairs

    def _allocate(self, job: Job, num_slots: int) -> bool:
        """Take a chunk for each sequence, or none."""
        chunks: list[int] = []
        for _ in range(job.num):
            offset = self._memory.allocate(num_slots)
            if offset is None:
                for taken in chunks:
                    self._memory.free(taken)
                return False
            chunks.append(offset)
        self._chunks[job.request_id] = chunks
        return True

    def _leave(self, job: Job, now: float) -> None:
        for offset in self._chunks.pop(job.request_id):
            self._memory.free(offset)
        self._count(job, -1, job.num_tokens)
        self.finish(job, now)

    def _count(self, job: Job, sign: int, context: int) -> None:
        """Count a request in or out, with the tokens that each of its sequences has."""
        num = sign * job.num
        self._num_seqs += num
        self._context += num * context
        self._promised += num * job.num_tokens
        self._reserved += num * self._reserve(job, self.max_model_len)
