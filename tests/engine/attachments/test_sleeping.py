"""A sleeping engine frees its memory; once awake, it answers like a fresh engine.

Covers `engine/start/model_memory.py`.
"""

import asyncio
import gc
import mmap
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.engine.client.async_client import pause, sleep, wake_up
from quire.engine.client.remote import RemoteClient
from quire.engine.start.model_memory import ModelMemory
from tests.engine.attachments.test_pausing import Reader, served, wanted
from tests.engine.attachments.test_weight_updates import PROMPTS, answers, open_llm
from tests.engine.client.test_remote import Served
from tests.support.models.reference_checkpoints import (
    changed,
    changed_tensors,
    checkpoint,
    pool_bytes,
)

__all__ = ["served"]
MB = 1 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_of(llm: LLM) -> ModelMemory:
    found = llm.engine.client._sleeping  # type: ignore[union-attr]
    assert found is not None and isinstance(found._memory, ModelMemory)
    return found._memory


@pytest.mark.parametrize("backend", ["cpu", pytest.param("torch", marks=pytest.mark.slow)])
def test_sleep_frees_pool_and_weights(backend: str) -> None:
    """The whole pool, whose blocks were all written, and on level 2 most of the weights."""
    settings: dict[str, Any] = {"attention_backend": backend, "weight_cache": "off"}
    settings |= {"dtype": "float32", "max_model_len": 512}
    with open_llm(Path("demo"), **settings, kv_cache_memory_bytes=200 * MB) as llm:
        before = answers(llm)
        whole = memory_of(llm)._whole
        assert whole is not None and whole.runner.backend.host_blocks is not None
        for blocks in whole.runner.backend.host_blocks._device_kv:
            blocks.fill_(1)
        used = resident_bytes()
        llm.sleep()
        assert used - resident_bytes() > 190 * MB
        llm.wake_up()
        assert answers(llm) == before
        used = resident_bytes()
        llm.sleep(level=2)
        assert used - resident_bytes() > 0.7 * whole.memory.weights_bytes
        llm.wake_up()
        assert answers(llm) == before


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_answers_and_clears_the_cache(architecture: str, level: int) -> None:
    """States, sessions and pinned prefixes are recomputed."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with open_llm(checkpoint(architecture), dtype="float32") as llm:
        before = answers(llm)
        session = llm.session()
        session.append(PROMPTS[1]["prompt_token_ids"])
        session.generate(params)
        llm.pin_prefix(PROMPTS[2])
        assert not llm.is_sleeping
        llm.sleep(level=level)
        assert llm.is_sleeping
        with pytest.raises(RequestError, match="call wake_up"):
            llm.generate(PROMPTS, params)
        with pytest.raises(RequestError, match="call wake_up"):
            next(llm.stream(PROMPTS[0], params))
        llm.wake_up(["kv_cache"])
        assert llm.is_sleeping
        llm.wake_up(["weights"])
        assert not llm.is_sleeping
        [output] = llm.generate(PROMPTS[1:2], params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert answers(llm) == before
        [continued] = session.generate(params).outputs
        prompt = session.token_ids[: -len(continued.token_ids)]
        [again] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert again.outputs[0].token_ids == continued.token_ids


def test_update_replaces_freed_weights() -> None:
    """vLLM's order: sleep, wake the weights, update them, wake the cache."""
    with open_llm(changed("qwen3", 1), dtype="float32") as fresh:
        wanted_answers = answers(fresh)
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        answers(llm)
        llm.sleep(level=2)
        assert not memory_of(llm).has_weights
        llm.wake_up(tags=["weights"])
        with pytest.raises(RequestError, match="lack"):
            llm.update_weights({"a": changed_tensors("qwen3", 1)["lm_head.weight"]})
        llm.update_weights(changed_tensors("qwen3", 1), "one")
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == wanted_answers
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm) == wanted_answers


def test_wake_up_rejects_weights_whose_files_have_changed(tmp_path: Path) -> None:
    """The engine reads an update's files again if they are unchanged. Otherwise it sleeps until it
    gets the weights, and never falls back to older ones."""
    path = tmp_path / "new"
    shutil.copytree(changed("qwen3", 1), path)
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        llm.update_weights(path, "one")
        one = answers(llm)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == one
        [output] = llm.generate(PROMPTS[:1], use_tqdm=False)
        assert [each.version for each in output.outputs[0].weights_versions] == ["one"]
        llm.sleep(2)
        for file in path.glob("*.safetensors"):
            shutil.copy(changed("qwen3", 2) / file.name, file)
        for _ in range(2):
            with pytest.raises(RequestError, match="send the weights with update_weights"):
                llm.wake_up()
            assert llm.is_sleeping
        llm.update_weights(changed_tensors("qwen3", 1))
        llm.wake_up()
        assert answers(llm) == one
        llm.sleep(2)
        with pytest.raises(RequestError, match="send the weights with update_weights"):
            llm.wake_up()


def test_dummy_weights_are_restored_after_a_sleep() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "seed": 3}
    with open_llm(checkpoint("qwen3"), **settings) as llm:
        before = answers(llm)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == before
        llm.update_weights(checkpoint("qwen3"))
        real = answers(llm)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == real != before, "the files hold the current weights"


def test_streams_are_aborted_or_finish_before_a_sleep() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with open_llm(checkpoint("qwen3"), dtype="float32") as llm:
        [whole] = llm.generate(PROMPTS[:1], long, use_tqdm=False)
        for mode, reason in (("abort", "abort"), ("wait", "length")):
            stream = llm.stream(PROMPTS[0], long)
            tokens = [*next(stream).outputs[0].token_ids]
            llm.sleep(mode=mode)
            for output in stream:
                tokens += output.outputs[0].token_ids
            assert output.outputs[0].finish_reason == reason
            assert tokens == whole.outputs[0].token_ids[: len(tokens)]
            assert (len(tokens) == 30) == (mode == "wait")
            llm.wake_up()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda llm: llm.sleep(level=3), "level=3 is unknown; use 1 or 2"),
        (lambda llm: llm.sleep(mode="keep"), "a sleep loses the blocks that keep would need"),
        (lambda llm: llm.wake_up(["gpu"]), "are unknown; use weights and kv_cache"),
    ],
)
def test_invalid_sleep_and_wake_up_arguments_are_rejected(order: Any, message: str) -> None:
    with open_llm(checkpoint("llama")) as llm:
        with pytest.raises(RequestError, match=message):
            order(llm)
        llm.wake_up()  # an engine that is awake stays awake
        assert not llm.is_sleeping


def test_engine_with_adapters_sleeps_on_level_1_only() -> None:
    with open_llm(checkpoint("llama"), enable_lora=True) as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="cannot sleep on level 2: adapters"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == before


def test_client_requests_wait_until_the_engine_wakes_up(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        for level, mode in ((1, "abort"), (2, "wait")):
            running = Reader(client, f"running {level}")
            await running.first.wait()
            sleeping = asyncio.create_task(sleep(client, level, mode))
            await client.metrics()
            later = Reader(client, f"later {level}")
            await asyncio.gather(sleeping, running.task)
            assert running.reason == ("abort" if mode == "abort" else "length")
            assert running.tokens == whole[: len(running.tokens)]
            await client.metrics()
            assert await client.set_sleep() and not later.tokens
            with pytest.raises(RequestError, match="wake it up instead"):
                await client.pause(False)
            await wake_up(client, None)
            await later.task
            assert later.tokens == whole and not await client.pause(None)
        await client.close()

    asyncio.run(run())


def test_frozen_request_blocks_a_sleep(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        running = Reader(client, "running")
        await running.first.wait()
        await pause(client, "keep", clear_cache=False)
        with pytest.raises(RequestError, match="continue them with resume, then sleep"):
            await sleep(client, 1, "abort")
        assert not await client.set_sleep()
        await client.pause(False)
        await running.task
        assert running.reason == "length"
        await client.close()

    asyncio.run(run())


def test_pause_or_wake_up_cancels_a_sleep_that_waits_for_requests(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        orders = {
            "frozen requests": lambda: pause(client, "keep", clear_cache=False),
            "before it slept": lambda: wake_up(client, None),
        }
        for number, (message, order) in enumerate(orders.items()):
            running = Reader(client, f"running {number}")
            await running.first.wait()
            sleeping = asyncio.create_task(sleep(client, 1, "wait"))
            await client.metrics()
            await order()
            with pytest.raises(RequestError, match=message):
                await sleeping
            assert not await client.set_sleep()
            await client.pause(False)
            await running.task
            assert running.tokens == whole
        await client.close()

    asyncio.run(run())


def test_sleeping_engine_closes(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        await sleep(client, 2, "abort")
        await client.close()

    asyncio.run(run())
    served.stop()
    served.core.close()


@pytest.mark.slow
def test_sleep_keeps_blocks_that_are_on_their_way_to_a_store(tmp_path: Path) -> None:
    """A sleep neither loses nor corrupts blocks on their way to a directory."""
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "dtype": "float32"}
    with open_llm(checkpoint("qwen3"), **few, kv_disk_dir=str(tmp_path)) as llm:
        before = answers(llm)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == before
    for _ in range(2):
        with open_llm(checkpoint("qwen3"), **few, kv_disk_dir=str(tmp_path)) as llm:
            assert answers(llm) == before
