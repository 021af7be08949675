"""Send token ids and get token ids.

vLLM: examples/generate/token_generation_client.py
Needs: server
"""

import argparse

import requests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    root = parser.parse_args().base_url.removesuffix("/v1")
    sampling = {"max_tokens": 4, "temperature": 0.2, "detokenize": False}
    payload = {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": False}
    response = requests.post(f"{root}/inference/v1/generate", json=payload, timeout=60)
    response.raise_for_status()
    print(response.json()["choices"][0]["token_ids"])


if __name__ == "__main__":
    main()
