"""Constrain a server's answers.

vLLM: examples/features/structured_outputs/structured_outputs_client.py
Needs: server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Classify: vLLM is wonderful!"}]
    for constraint in ({"choice": ["positive", "negative"]}, {"regex": "[a-z]{3,9}\\.com"}):
        completion = client.chat.completions.create(
            model=model, messages=messages, extra_body={"structured_outputs": constraint}
        )
        print(completion.choices[0].message.content)


if __name__ == "__main__":
    main()
