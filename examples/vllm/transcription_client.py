"""Write down what a sound says.

vLLM: examples/online_serving/openai_transcription_client.py
Needs: server
Refused: transcribe or speak with another server
"""

import argparse

from openai import OpenAI


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
    model = client.models.list().data[0].id
    transcription = client.audio.transcriptions.create(
        file=("sound.wav", b"RIFF"), model=model, language="en"
    )
    print(transcription.text)


if __name__ == "__main__":
    main()
