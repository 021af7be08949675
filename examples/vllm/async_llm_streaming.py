"""Stream answers from an engine in another process.

vLLM: examples/deployment/async_llm_streaming.py
"""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            print("\nfinished")
            break


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", enforce_eager=True))
    try:
        for i, prompt in enumerate(["Once upon a time", "In a forest"], 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
