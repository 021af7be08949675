"""Get embeddings from a server.

vLLM: examples/pooling/embed/openai_embedding_client.py
Needs: embed server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    response = client.embeddings.create(input=["Hello", "The best thing is"], model=model)
    for data in response.data:
        print(data.embedding[:4])


if __name__ == "__main__":
    main()
