"""Get the same text twice for one seed.

vLLM: examples/features/batch_invariance/reproducibility_offline.py
"""

import os
import random

from vllm import LLM, SamplingParams

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main():
    llm = LLM(model="demo", seed=42)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    first, second = (llm.generate("Once upon a time", params) for _ in range(2))
    assert first[0].outputs[0].text == second[0].outputs[0].text
    print(f"Output: {first[0].outputs[0].text!r} Random number: {random.randint(0, 100)}")


if __name__ == "__main__":
    main()
