"""llama.cpp through llama-cpp-python, with its `LlamaPromptLookupDecoding`. No options."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cpu.drivers.drafting import PLAIN, Answer, Answerer, Job, Request, drive


class Counted:
    """A drafter that counts its calls: one for each step after the prompt's."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.num_steps = self.num_tried = 0

    def __call__(self, input_ids: Any, **given: Any) -> Any:
        found = self._drafter(input_ids, **given)
        self.num_steps += 1
        self.num_tried += len(found)
        return found


def answerer(llama: Any, drafter: Counted | None) -> Answerer:
    def answer(request: Request) -> Answer:
        llama.reset()
        token_ids: list[int] = []
        first_s = 0.0
        if drafter is not None:
            drafter.num_steps = drafter.num_tried = 0
        for token in llama.generate(request.prompt, temp=0.0, repeat_penalty=1.0):
            first_s = first_s or time.perf_counter()
            token_ids.append(int(token))
            if len(token_ids) == request.count or token == request.stop:
                break
        seconds = time.perf_counter() - first_s
        if drafter is None:
            return Answer.of(request, token_ids, seconds, 0, 0)
        right = len(token_ids) - 1 - drafter.num_steps
        return Answer.of(request, token_ids, seconds, drafter.num_tried, max(0, right))

    return answer


@contextmanager
def answerers(job: Job) -> Iterator[dict[str, Answerer]]:
    """Yield the variants. The drafter's look-up length has its default, 2 tokens."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafters: dict[str, Counted | None] = {PLAIN: None}
    for num in job.guesses:
        drafters[f"lookup {num}"] = Counted(LlamaPromptLookupDecoding(num_pred_tokens=num))
    found = {}
    for name, drafter in drafters.items():
        llama = Llama(
            str(job.model), n_ctx=job.max_len, n_batch=job.max_len, n_threads=job.threads,
            n_threads_batch=job.threads, draft_model=drafter, verbose=False,
        )  # fmt: skip
        found[name] = answerer(llama, drafter)
    yield found


if __name__ == "__main__":
    drive(answerers)
