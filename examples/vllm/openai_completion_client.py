"""Continue a text by a server.

vLLM: examples/basic/online_serving/openai_completion_client.py
Needs: server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model, prompt="A robot may not", echo=False, n=2, logprobs=3, max_tokens=8
    )
    print(completion.choices[0].text)


if __name__ == "__main__":
    main()
