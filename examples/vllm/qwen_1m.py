"""Apply a chat template and count the tokens of a long prompt.

vLLM: examples/generate/qwen_1m_offline.py
"""

import os

from vllm import LLM, SamplingParams

os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def main():
    llm = LLM(model="demo", max_model_len=2048, enable_chunked_prefill=True, enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Tell me about the fox. " * 50}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.05, max_tokens=16)
    [output] = llm.generate([text], params)
    ids = output.prompt_token_ids
    print(f"Prompt length: {len(ids)} Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
