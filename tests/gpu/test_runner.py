"""The GPU runner: graphs, swaps, fp8, and agreement with torch's operations.

`make gpu-check PART=models` runs these; elsewhere they are not collected. Each step fails
if it makes the host wait (`debug_transfers`).
"""

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.host.native import core
from quire.runner.gpu.step_launcher import StepLauncher
from tests.support.models.reference_checkpoints import ARCHITECTURES, checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(5 + 9 * i)]} for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.4, max_tokens=24, ignore_eos=True
)
MODES: dict[str, dict[str, Any]] = {
    "full": {"compilation": "full"},
    "piecewise": {"compilation": "piecewise"},
    "eager": {"enforce_eager": True},
    "one plan at a time": {"pipeline_depth": 1},
    "launched by the core": {"native_launch": True},
}


def open_llm(architecture: str, backend: str, **settings: Any) -> LLM:
    plain = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": True}
    plain |= {"debug_transfers": backend == "triton", "attention_backend": backend}
    return LLM(str(checkpoint(architecture)), device="cuda", **plain | settings)


def rounds(llm: LLM, params: SamplingParams, num: int = 3) -> list[list[list[int]]]:
    """Return the tokens of each round. A later round replays what an earlier one recorded."""
    answers = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(num)]
    return [[list(each.outputs[0].token_ids) for each in outputs] for outputs in answers]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_moe"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_match_torch(architecture: str, mode: str) -> None:
    with open_llm(architecture, "torch") as llm:
        wanted = rounds(llm, GREEDY, 1)
    with open_llm(architecture, "triton", max_num_seqs=5, **MODES[mode]) as llm:
        assert rounds(llm, GREEDY) == 3 * wanted


@pytest.mark.parametrize("mode", MODES)
def test_sampled_tokens_match_torch(mode: str) -> None:
    with open_llm("llama", "torch") as llm:
        wanted = rounds(llm, SAMPLED, 1)
    with open_llm("llama", "triton", **MODES[mode]) as llm:
        assert rounds(llm, SAMPLED) == 3 * wanted


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
def test_native_launch_uses_the_step_launcher(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs many steps, alone and several in flight, each with its tokens in the mail."""
    num_steps, launch = [0], StepLauncher.launch

    def counting_launch(*its: Any) -> Any:
        num_steps[0] += 1
        return launch(*its)

    monkeypatch.setattr(StepLauncher, "launch", counting_launch)
    with open_llm("llama", "triton", native_launch=True) as llm:
        rounds(llm, GREEDY, 20)
    assert "native_launch has no effect" not in caplog.text and num_steps[0] > 20 * 20


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_give_the_same_tokens(mode: str) -> None:
    small = {"block_size": 4, "kv_cache_memory_bytes": 40 * 2 * 2 * 2 * 4 * 8 * 4}
    with open_llm("llama", "triton") as llm:
        wanted = rounds(llm, GREEDY, 1)
    with open_llm("llama", "triton", preemption_mode=mode, max_num_seqs=8, **small) as llm:
        assert rounds(llm, GREEDY) == 3 * wanted


def logprobs_of_prompts(backend: str, dtype: str, kv_format: str) -> torch.Tensor:
    """Return the log-probabilities of all prompt tokens but each prompt's first."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with open_llm("llama", backend, dtype=dtype, kv_cache_dtype=kv_format) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return torch.tensor(
        [
            position[token].logprob
            for output in outputs
            for token, position in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kv_format", "near"), [("auto", 0.06), ("int8", 0.3)])
def test_prompt_logprobs_are_near_torch(kv_format: str, near: float, dtype: str) -> None:
    wanted = logprobs_of_prompts("torch", dtype, "auto")
    found = logprobs_of_prompts("triton", dtype, kv_format)
    assert float((found - wanted).abs().max()) < near


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.1), ("float16", 0.03)])
def test_fp8_kv_logprobs_match_rounded_keys_and_values(
    dtype: str, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's backend stores keys and values rounded to e4m3.

    A difference in the last of 16 bits can round a key to another e4m3 number, and move a
    log-probability by some tenths. So the test bounds the mean. The mean is 0.007 in float16 under
    the interpreter, and 0.05 in bfloat16 if each key and value is a bit off. It is 0.14 if one side
    does not round (one log-probability differs by 1.8 then), and 0.6 or more if a scale is wrong by
    a factor of 2.
    """
    write = TorchBackend.write

    def write_rounded(
        backend: TorchBackend, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        rounded = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k_TKH, v_TKH))
        write(backend, layer, *rounded)

    found = logprobs_of_prompts("triton", dtype, "fp8")
    monkeypatch.setattr(TorchBackend, "write", write_rounded)
    wanted = logprobs_of_prompts("torch", dtype, "auto")
    assert float((found - wanted).abs().mean()) < near


def test_the_first_start_saves_its_graph_list_for_the_next(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_llm("llama", "triton") as llm:
        first = rounds(llm, GREEDY)
    (saved,) = (tmp_path / "quire" / "graphs").iterdir()
    assert saved.stat().st_size > len('{"graphs": []}')
    with open_llm("llama", "triton") as llm:
        assert rounds(llm, GREEDY) == first


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_5"])
def test_deterministic_logprobs_do_not_depend_on_the_batch(architecture: str) -> None:
    """One request alone, in a batch, in small chunks, in eager mode, and with its prompt cached."""
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=16, logprobs=1, ignore_eos=True)
    found = []
    for settings in ({}, {"max_num_batched_tokens": 24}, {"enforce_eager": True}):
        settings = {"dtype": "bfloat16", "deterministic": True} | settings
        with open_llm(architecture, "triton", **settings) as llm:
            alone = llm.generate(PROMPTS[-1:], params, use_tqdm=False)[0]
            again = llm.generate(PROMPTS[-1:], params, use_tqdm=False)[0]
            among = llm.generate(PROMPTS, params, use_tqdm=False)[-1]
        found += [
            [
                {token: each.logprob for token, each in at.items()}
                for at in output.outputs[0].logprobs
            ]
            for output in (alone, again, among)
        ]
    assert all(each == found[0] for each in found)
