"""Chat with a server, whole and as a stream.

vLLM: examples/basic/online_serving/openai_chat_completion_client.py
Needs: server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Tell me a story."}]
    completion = client.chat.completions.create(messages=messages, model=model, max_tokens=8)
    print(completion.choices[0].message.content)
    for chunk in client.chat.completions.create(
        messages=messages, model=model, max_tokens=8, stream=True
    ):
        print(chunk.choices[0].delta.content, end="")


if __name__ == "__main__":
    main()
