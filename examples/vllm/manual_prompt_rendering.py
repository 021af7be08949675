"""Render prompts apart from generating.

vLLM: examples/basic/offline_inference/manual_prompt_rendering.py
Refused: vllm.renderers is not offered by quire: give `generate` the text or the messages themselves
"""

from vllm import LLM, SamplingParams
from vllm.renderers.inputs.preprocess import parse_model_prompt


def main():
    llm = LLM(model="demo")
    prompt = parse_model_prompt(llm.llm_engine.model_config, "Hello, my name is")
    llm.generate(prompt, SamplingParams(temperature=0.8, top_p=0.95))


if __name__ == "__main__":
    main()
