"""Ask about a sound.

vLLM: examples/generate/multimodal/audio_language_offline.py
Refused: vllm.assets is not offered by quire: it downloads vLLM's sample files
"""

from vllm import LLM
from vllm.assets.audio import AudioAsset


def main():
    audio = AudioAsset("mary_had_lamb").audio_and_sample_rate
    LLM(model="demo").generate({"prompt": "What?", "multi_modal_data": {"audio": [audio]}})


if __name__ == "__main__":
    main()
