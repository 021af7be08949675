"""Ask about an image.

vLLM: examples/generate/multimodal/vision_language_offline.py
Needs: seeing
Change: an image of your own instead of `vllm.assets`
"""

from dataclasses import asdict

from PIL import Image
from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = FlexibleArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    engine_args = EngineArgs(
        args.model, load_format=args.load_format, limit_mm_per_prompt={"image": 1}
    )
    llm = LLM(**(asdict(engine_args) | {"seed": 0}))
    image = Image.new("RGB", (64, 64), "red")
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}]
    params = SamplingParams(temperature=0.2, max_tokens=4)
    [output] = llm.chat([{"role": "user", "content": content}], params)
    print(f"Output: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
