"""Ask two questions about one long table, the second from cache.

vLLM: examples/features/automatic_prefix_caching/automatic_prefix_caching_offline.py
"""

import time

from vllm import LLM, SamplingParams

TABLE = "You know this table. " + "| 1 | John Doe | 29 | Engineer | " * 20


def get_generation_time(llm, sampling_params, prompts):
    start = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    print(f"Output: {output[0].outputs[0].text!r} Generation time: {time.time() - start} s")
    return output[0]


def main():
    llm = LLM(model="demo", enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=10)
    get_generation_time(llm, params, TABLE + "How old is John?")
    second = get_generation_time(llm, params, TABLE + "What does John do?")
    assert second.num_cached_tokens > 0


if __name__ == "__main__":
    main()
