"""Make a server call a tool.

vLLM: examples/online_serving/openai_chat_completion_client_with_tools_required.py
Needs: server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    tool = {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 10}},
                "required": ["city"],
            },
        },
    }
    messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
    completion = client.chat.completions.create(
        messages=messages, model=model, tools=[tool], tool_choice="required", max_tokens=64
    )
    print(completion.choices[0].message.tool_calls[0].function)


if __name__ == "__main__":
    main()
