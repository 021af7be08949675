"""The engine on a GPU: tokens equal the CPU's, and memory use stays within the plan.

`make gpu-check` runs these; elsewhere they are not collected.
"""

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops.blocks.host_blocks import HostBlocks
from quire.runner.memory_plan import GPU_CONTEXT_BYTES
from tests.support.models.reference_checkpoints import ARCHITECTURES, checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(5 + 9 * i)]} for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def tokens(device: str, architecture: str, **settings: object) -> list[list[int]]:
    settings = {"dtype": "float64", "kv_cache_memory_bytes": 1 << 26, **settings}
    folder = str(checkpoint(architecture))
    with LLM(folder, device=device, disable_log_stats=True, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [7, 512])
def test_greedy_tokens_match_the_cpu(architecture: str, budget: int) -> None:
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    assert tokens("cuda", architecture, **settings) == tokens("cpu", architecture, **settings)


def test_pipeline_depth_two_gives_the_same_tokens() -> None:
    assert tokens("cuda", "llama", pipeline_depth=2) == tokens("cuda", "llama")


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26}  # other engines share the GPU
    with LLM(str(checkpoint("llama")), device="cuda", **settings) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.alone
def test_memory_stays_within_gpu_memory_utilization() -> None:
    """Memory that other programs use does not count. This process's CUDA context does."""
    share = 0.3
    free, total = torch.cuda.mem_get_info()
    others = max(0, total - free - GPU_CONTEXT_BYTES)
    with LLM("shape:qwen3-0.6b", gpu_memory_utilization=share, max_model_len=2048) as llm:
        prompts = [[i + 1] * 500 for i in range(300)]
        llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        free, _ = torch.cuda.mem_get_info()
        assert llm.engine.memory.pool_bytes > 0.5 * share * total
        assert total - free - others <= share * total


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_gives_the_same_tokens(mode: str) -> None:
    """The step that swaps blocks out also overwrites them, while their copies are in flight."""
    small = {"block_size": 4, "kv_cache_memory_bytes": 40 * 2 * 2 * 2 * 4 * 8 * 8}
    got = tokens("cuda", "llama", preemption_mode=mode, max_num_seqs=8, **small)
    assert got == tokens("cuda", "llama")


def test_swapped_blocks_are_restored_unchanged() -> None:
    """Several overlapping copies are in flight while the device's blocks change."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    kv = torch.rand(2, 64, 4096, device="cuda", generator=generator)
    before, host = kv.cpu(), HostBlocks([kv], dim=1)
    first, second = np.arange(32, dtype=np.int32), np.arange(16, 48, dtype=np.int32)
    host.swap_out(0, first, first)
    host.swap_out(0, second, second)
    kv.zero_()
    host.load(0, second, first)
    assert torch.equal(kv[:, :32].cpu(), before[:, 16:48])


def test_single_blocks_are_read_and_written_during_swaps() -> None:
    """A read waits for the copies in flight to its block. A late copy overwrites nothing newer."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    kv = torch.rand(2, 64, 4096, device="cuda", generator=generator)
    before, host = kv.cpu(), HostBlocks([kv], dim=1)
    first, second = np.arange(32, dtype=np.int32), np.arange(16, 48, dtype=np.int32)
    host.swap_out(0, first, first)
    host.swap_out(0, second, second)
    kv.zero_()
    assert bytes(host.read(0, 20)) == before[:, 20].numpy().tobytes()
    host.swap_out(0, first, first)  # zeros, over the first copy
    data = before[:, 63].numpy().tobytes()
    host.write(0, 5, data)
    host.load(0, first, first)
    assert kv[:, 5].cpu().numpy().tobytes() == data
    assert not kv[:, :5].any() and not kv[:, 6:32].any()
