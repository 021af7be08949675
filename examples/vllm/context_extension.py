"""Extend the context by a scaled rotary embedding.

vLLM: examples/features/context_extension/context_extension_offline.py
"""

from vllm import LLM, SamplingParams


def main():
    hf_overrides = {
        "rope_parameters": {
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "rope_theta": 10000,
            "rope_type": "yarn",
        },
        "max_position_embeddings": 8192,
    }
    llm = LLM(model="demo", hf_overrides=hf_overrides)
    sampling_params = SamplingParams(temperature=0.8, max_tokens=16)
    conversation = [{"role": "user", "content": "Hello"}]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print(outputs[0].outputs[0].text, llm.llm_engine.model_config.max_model_len)


if __name__ == "__main__":
    main()
