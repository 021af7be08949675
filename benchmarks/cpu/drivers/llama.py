"""llama.cpp, through the C functions that llama-cpp-python exposes. options: `adapter`, the path of
a GGUF file, if there is one.

It gets its best case: contexts made for the workload, logits of the last tokens only, and the
greedy choice by numpy. A shared prefix is computed once and copied to all sequences by hand.
"""

import ctypes
import importlib
import time

from benchmarks.cpu.drivers.common import Job, Prompts, drive

PHYSICAL_BATCH = 512
PADDING = 256


class LlamaModel:
    def __init__(self, job: Job) -> None:
        import llama_cpp
        import numpy as np

        self._c, self._np, self._workload = llama_cpp, np, job.workload
        self._log: list[bytes] = []
        self._on_log = llama_cpp.llama_log_callback(
            lambda level, text, data: self._log.append(text)
        )
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(job.model).encode(), params)
        assert self._model, b"".join(self._log[-8:]).decode()
        self._vocab_size = job.workload.shape.vocab_size
        self._context = self._make_context(job)
        if adapter := job.options.get("adapter"):
            self._use_adapter(adapter)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._prefix: list[int] = []

    def _make_context(self, job: Job) -> object:
        """Make a context. A shared prefix needs one cache for all sequences; the others are faster
        with several."""
        work = job.workload
        per_sequence = -(-(work.max_len + 1) // PADDING) * PADDING
        num_slots = work.num_requests * per_sequence
        if work.shared:
            num_slots = work.shared + work.num_requests * (work.own + work.output_len + PADDING)
        self._batch_size = max(2048, work.shared)
        params = self._c.llama_context_default_params()
        params.n_ctx = num_slots
        params.n_batch = self._batch_size
        params.n_ubatch = PHYSICAL_BATCH
        params.n_seq_max = work.num_requests + (1 if work.shared else 0)
        params.n_threads = params.n_threads_batch = job.threads
        params.kv_unified = work.shared > 0
        params.no_perf = True
        self.kv_bytes = num_slots * work.shape.kv_bytes_per_token
        self._batch = self._c.llama_batch_init(self._batch_size, 0, 1)
        context = self._c.llama_init_from_model(self._model, params)
        assert context, b"".join(self._log[-8:]).decode()
        return context

    def _use_adapter(self, path: str) -> None:
        """Add an adapter, with the scale 1, to all that the context computes."""
        c = self._c
        adapter = c.llama_adapter_lora_init(self._model, path.encode())
        assert adapter, b"".join(self._log[-8:]).decode()
        adapters, scales = (c.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
        status = c.llama_set_adapters_lora(self._context, adapters, 1, scales)
        assert status == 0, f"the adapter is refused with status {status}"

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows and return the most probable next token of each row that wants logits.

        rows: (token, position, sequence, wants logits).
        """
        best = []
        for start in range(0, len(rows), self._batch_size):
            piece, batch = rows[start : start + self._batch_size], self._batch
            batch.n_tokens = len(piece)
            for i, (token, position, sequence, needs_logits) in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, needs_logits
            status = self._c.llama_decode(self._context, batch)
            assert status == 0, f"llama_decode returned {status}"
            best += [self._best(i) for i, row in enumerate(piece) if row[3]]
        return best

    def _best(self, index: int) -> int:
        logits = self._c.llama_get_logits_ith(self._context, index)
        return int(self._np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _prompt_rows(
        self, prompt: list[int], sequence: int, start: int = 0, needs_logits: bool = True
    ) -> list[tuple[int, int, int, bool]]:
        last = len(prompt) - 1
        return [(t, start + i, sequence, needs_logits and i == last) for i, t in enumerate(prompt)]

    def _continue(self, tokens: list[int], length: int, first: int, count: int) -> int:
        """Compute a step of the sequences from `first` on and return their next tokens.

        tokens: one of each sequence, at position `length`.
        """
        for step in range(count - 1):
            rows = [(t, length + step, first + i, True) for i, t in enumerate(tokens)]
            tokens = self._decode(rows)
        return count * len(tokens)

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        self._c.llama_memory_clear(self._memory, True)
        (token,) = self._decode(self._prompt_rows(prompt, 0))
        times = [time.perf_counter()]
        for step in range(count - 1):
            (token,) = self._decode([(token, len(prompt) + step, 0, True)])
            times.append(time.perf_counter())
        return times

    def batch(self, prompts: Prompts, count: int) -> int:
        self._c.llama_memory_clear(self._memory, True)
        self._prefix = []
        rows = [row for i, p in enumerate(prompts) for row in self._prompt_rows(p, i)]
        return self._continue(self._decode(rows), len(prompts[0]), 0, count)

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        """Run requests with a shared prefix, which sequence 0 keeps."""
        if prefix != self._prefix:
            self._c.llama_memory_clear(self._memory, True)
            self._decode(self._prompt_rows(prefix, 0, needs_logits=False))
            self._prefix = prefix
        for i in range(len(own)):
            self._c.llama_memory_seq_rm(self._memory, i + 1, -1, -1)
            self._c.llama_memory_seq_cp(self._memory, 0, i + 1, -1, -1)
        rows = [row for i, p in enumerate(own) for row in self._prompt_rows(p, i + 1, len(prefix))]
        return self._continue(self._decode(rows), len(prefix) + len(own[0]), 1, count)


def import_engine() -> object:
    return importlib.import_module("llama_cpp")


if __name__ == "__main__":
    drive(import_engine, LlamaModel)
