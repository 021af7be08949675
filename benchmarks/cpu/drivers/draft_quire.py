"""quire, through `LLM`, with the n-grams, suffixes and models of `speculative_config`.

options: its settings, and "drafters": directories of draft models, by their method.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.cpu.drivers.drafting import PLAIN, Answer, Answerer, Job, Request, drive

KV_BYTES = 128 << 20
SUFFIX = 24  # draft tokens, the default


def answerer(llm: Any) -> Answerer:
    from quire import SamplingParams
    from quire.base.events import Stepped

    steps: list[Stepped] = []
    core = llm.engine.client.core
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)

    def answer(request: Request) -> Answer:
        params = SamplingParams(
            temperature=0.0, max_tokens=request.count, ignore_eos=True, detokenize=False,
            stop_token_ids=[] if request.stop is None else [request.stop],
        )  # fmt: skip
        steps.clear()
        token_ids: list[int] = []
        times = []
        for output in llm.stream({"prompt_token_ids": request.prompt}, params):
            times.append(time.perf_counter())
            token_ids += output.outputs[0].token_ids
        drafted, right = sum(s.num_draft_tokens for s in steps), sum(s.num_accepted for s in steps)
        return Answer.of(request, token_ids, times[-1] - times[0], drafted, right)

    return answer


def configs(draft_lengths: list[int], drafters: dict[str, str]) -> dict[str, dict[str, Any] | None]:
    """Return the speculative settings by the variant's name. drafters: directories of draft models,
    by their method."""
    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for num in draft_lengths:
        count = {"num_speculative_tokens": num}
        found[f"ngram {num}"] = {"method": "ngram"} | count
        short = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        found[f"ngram of 2-4, {num}"] = {"method": "ngram"} | short | count
        for method, directory in drafters.items():
            found[f"{method} {num}"] = {"method": method, "model": directory} | count
    return found | {f"suffix {SUFFIX}": {"method": "suffix", "num_speculative_tokens": SUFFIX}}


@contextmanager
def answerers(job: Job) -> Iterator[dict[str, Answerer]]:
    from quire import LLM

    settings = {name: value for name, value in job.options.items() if name != "drafters"}
    with ExitStack() as stack:
        found = {}
        for name, config in configs(job.guesses, job.options.get("drafters", {})).items():
            llm = LLM(
                str(job.model), device="cpu", max_model_len=job.max_len, max_num_seqs=1,
                kv_cache_memory_bytes=KV_BYTES, disable_log_stats=True,
                speculative_config=config, **settings,
            )  # fmt: skip
            found[name] = answerer(stack.enter_context(llm))
        yield found


if __name__ == "__main__":
    drive(answerers)
