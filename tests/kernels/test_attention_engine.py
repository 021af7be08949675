"""Whole models generate the same greedy tokens with the Triton and the torch backend."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.ops.registry import record_ops
from quire.runner.build import build_runner
from quire.runner.setup.profile import worst_case_plan
from tests.support.models.reference_checkpoints import ARCHITECTURES, checkpoint

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(5 + 9 * i)]} for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def tokens(
    architecture: str, backend: str, device: torch.device, num_prompts: int
) -> list[list[int]]:
    """Return greedy tokens; prompts are computed in chunks, in steps with decoding rows."""
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "disable_log_stats": True}
    settings |= {"max_num_batched_tokens": 24, "max_num_seqs": 3, "device": device.type}
    with LLM(str(checkpoint(architecture)), attention_backend=backend, **settings) as llm:
        outputs = llm.generate(PROMPTS[:num_prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


QUICK = ("mistral",)  # has a window; test_model.py has experts


@pytest.mark.parametrize(
    ("architecture", "num_prompts"),
    [
        ("gpt2", 1),  # biases, LayerNorm and learned positions
        *(
            pytest.param(each, len(PROMPTS), marks=[] if each in QUICK else pytest.mark.slow)
            for each in ARCHITECTURES
        ),
    ],
)
def test_triton_generates_the_greedy_tokens_of_torch(
    architecture: str, num_prompts: int, device: torch.device
) -> None:
    found, wanted = (
        tokens(architecture, backend, device, num_prompts) for backend in ("triton", "torch")
    )
    assert found == wanted


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_layer_runs_the_expected_operations(architecture: str, device: torch.device) -> None:
    """A layer takes nine launches, four of them products; a tenth merges split rows."""
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 2}
    settings |= {"device": device.type, "attention_backend": "triton", "enforce_eager": True}
    settings |= {"max_num_batched_tokens": 16}
    config = config_from_flat(model=str(checkpoint(architecture)), **settings)
    built = build_runner(config, resolve_model(config.model.model, None))
    plan, _ = worst_case_plan(built.config, len(built.spec.cache_groups), built.spec.vocab_size)
    with record_ops() as record:
        built.runner.run(plan)
    layer = ["linear", "rotary_write", "attention", "linear", "add_rms_norm", "linear", "silu_mul"]
    names = record.names[: record.names.index("select_rows")]
    first = ["embedding", "rotary_rows", "rms_norm", *layer, "linear"]
    assert names == [*first, "add_rms_norm", *layer, "linear", "add_rms_norm"]
