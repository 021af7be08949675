"""Continue a list of prompts.

vLLM: examples/basic/offline_inference/basic.py
"""

from vllm import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "Once upon a time", "The capital of France is"]


def main():
    llm = LLM(model="demo")
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for output in outputs:
        print(f"Prompt: {output.prompt!r} Output: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
