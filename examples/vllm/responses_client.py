"""Answer by the Responses API.

vLLM: examples/online_serving/openai_responses_client.py
Needs: server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    response = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=8)
    for message in response.output:
        print(message)


if __name__ == "__main__":
    main()
