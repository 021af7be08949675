"""Score texts by a server.

vLLM: examples/pooling/score/score_api_online.py
Needs: embed server
"""

import argparse

import requests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    root = parser.parse_args().base_url.removesuffix("/v1")
    prompt = {"text_1": "Where is Paris?", "text_2": ["In France.", "In a forest."]}
    response = requests.post(f"{root}/score", json=prompt, timeout=60)
    response.raise_for_status()
    print(response.json())


if __name__ == "__main__":
    main()
