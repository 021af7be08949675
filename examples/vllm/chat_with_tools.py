"""Answer with the help of a tool's schema.

vLLM: examples/offline_inference/chat_with_tools.py
"""

import json

from vllm import LLM
from vllm.sampling_params import SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def main():
    llm = LLM(model="demo", tokenizer_mode="auto")
    messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    outputs = llm.chat(messages, params, tools=TOOLS)
    answer = outputs[0].outputs[0].text.strip()
    messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": json.dumps({"temperature": 98})})
    print(repr(answer), repr(llm.chat(messages, params, tools=TOOLS)[0].outputs[0].text))


if __name__ == "__main__":
    main()
