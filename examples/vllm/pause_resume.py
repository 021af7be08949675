"""Pause all generation for a while.

vLLM: examples/features/pause_resume/pause_resume_offline.py
"""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", enforce_eager=True))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    has_begun = asyncio.Event()

    async def generate():
        async for output in engine.generate("Once", params, request_id="test-req"):
            print(len(output.outputs[0].token_ids))
            has_begun.set()

    generating = asyncio.create_task(generate())
    await has_begun.wait()
    await engine.pause_generation(mode="keep")
    print("paused:", await engine.is_paused())
    await asyncio.sleep(1)
    await engine.resume_generation()
    await generating
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
