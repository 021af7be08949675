"""Routed experts: an engine returns them, and a trainer replays them.

Covers `models/parts/routes.py`, `runner/sampling/routed_experts.py` and
`engine/client/token_values.py`.
"""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.plan import TokenValues
from quire.base.requests.outputs import CompletionOutput, Logprob
from quire.base.settings.config import config_from_flat
from quire.base.step_outputs import SequenceUpdate, StepOutputs
from quire.engine.client.token_values import joined
from quire.engine.start.build import build_engine
from quire.engine.wire.wire import LENGTH, client_codec, core_codec
from quire.ops.host.native import core
from quire.render.renderer import RenderedPrompt
from quire.training import Samples, TrainingModel
from tests.support.models.reference_checkpoints import (
    changed,
    checkpoint,
    pool_bytes,
    reference_model,
)

VOCAB, BLOCK = 97, 4
NUM_MIXTURES, NUM_CHOSEN = 2, 3
MARGIN = 1e-3  # between logits: float32 rounding cannot swap their order

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


def settings_of(dtype: str, num_blocks: int = 200, **settings: Any) -> dict[str, Any]:
    path = checkpoint("qwen3_moe", VOCAB)
    pool = pool_bytes(path, num_blocks, BLOCK, 8 if dtype == "float64" else 4)
    return {
        "dtype": dtype, "block_size": BLOCK, "kv_cache_memory_bytes": pool,
        "enable_return_routed_experts": True, "max_num_batched_tokens": 24,
        "disable_log_stats": True,
    } | settings  # fmt: skip


def open_llm(dtype: str, num_blocks: int = 200, **settings: Any) -> LLM:
    return LLM(str(checkpoint("qwen3_moe", VOCAB)), **settings_of(dtype, num_blocks, **settings))


def prompts() -> list[list[int]]:
    """Return prompts with a common prefix, each longer than a step's budget."""
    numbers = np.random.default_rng(5)
    start = numbers.integers(0, VOCAB, 30).tolist()
    return [[*start, *numbers.integers(0, VOCAB, 3 + i).tolist()] for i in range(6)]


def generate(llm: LLM, **params: Any) -> list[RequestOutput]:
    given = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True} | params
    requests = [{"prompt_token_ids": each} for each in prompts()]
    return llm.generate(requests, SamplingParams(**given), use_tqdm=False)


def check(outputs: list[RequestOutput], path: Path | None = None) -> int:
    """Compare all experts with those of transformers; return how many tokens were compared."""
    model, num = reference_model(path or checkpoint("qwen3_moe", VOCAB)), 0
    for output in outputs:
        for sample in output.outputs:
            ids = [*(output.prompt_token_ids or ()), *sample.token_ids][:-1]
            found = sample.routed_experts
            assert found is not None and found.dtype == np.int16
            assert found.shape == (len(ids), NUM_MIXTURES, NUM_CHOSEN)
            with torch.no_grad():
                logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
            for mixture, logits_TE in enumerate(logits):
                best_TC, wanted_TC = logits_TE.topk(NUM_CHOSEN + 1)
                is_clear_T = (best_TC[:, :-1] - best_TC[:, 1:]).min(dim=1).values > MARGIN
                wanted_TC = wanted_TC[is_clear_T, :NUM_CHOSEN]
                assert (found[is_clear_T.numpy(), mixture] == wanted_TC.numpy()).all()
                num += len(wanted_TC)
    return num


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=needs_core)])
def test_routed_experts_match_transformers(dtype: str) -> None:
    """With chunked prompts and several samples per prompt."""
    with open_llm(dtype) as llm:
        outputs = generate(llm, n=2)
    assert check(outputs) > 0.9 * NUM_MIXTURES * sum(len(each) + 11 for each in prompts()) * 2


def test_preempted_rows_report_all_experts() -> None:
    with open_llm("float32", num_blocks=40) as llm:
        outputs = generate(llm, max_tokens=30)
    assert sum(each.metrics.num_preemptions for each in outputs if each.metrics) > 0
    assert check(outputs) > 0


@needs_core
def test_updated_weights_choose_their_own_experts() -> None:
    path = changed("qwen3_moe", 1)
    with open_llm("float32") as llm:
        before = generate(llm, seed=1)[0].outputs[0].routed_experts
        llm.update_weights(path)
        outputs = generate(llm, seed=1)
    after = outputs[0].outputs[0].routed_experts
    assert check(outputs, path) > 0 and before is not None and after is not None
    assert (before[:30] != after[:30]).any()


def test_token_values_survive_the_wire_format() -> None:
    values = TokenValues(2, (1, 3), np.array([4, 5, 6], np.int16))
    message = StepOutputs(details=[SequenceUpdate("a", token_values=values)])
    found = client_codec().decode(core_codec().encode(message)[LENGTH.size :])
    assert isinstance(found, StepOutputs)
    own = found.details[0].token_values
    assert own is not None and (own.first, own.shape) == (2, (1, 3))
    assert own.values.dtype == np.int16 and own.values.tolist() == [4, 5, 6]


def test_experts_end_at_the_stop_string() -> None:
    """The client cuts the text there. The core has already computed more tokens."""
    with open_llm("float32", tokenizer="demo") as llm:
        whole = generate(llm)[0].outputs[0]
        stop = whole.text[3:5]
        ended = generate(llm, stop=[stop])
    cut = ended[0].outputs[0]
    assert cut.stop_reason == stop and 0 < len(cut.token_ids) < len(whole.token_ids)
    assert check(ended) > 0


@needs_core
def test_an_open_prompt_returns_all_experts() -> None:
    path, ids = checkpoint("qwen3_moe", VOCAB), prompts()[0]
    engine = build_engine(config_from_flat(model=str(path), **settings_of("float32")))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    made = engine.requests.make(RenderedPrompt(ids[:9]), params)
    engine.client.add(msgspec.structs.replace(made, is_open=True))
    engine.client.append(made.request_id, ids[9:20])
    for _ in range(4):  # computes a part before the rest arrives
        assert engine.client.step() == []
    engine.client.append(made.request_id, ids[20:], is_last=True)
    outputs = list[RequestOutput]()
    while not (outputs and outputs[-1].finished):
        outputs += engine.client.step()
    engine.client.close()
    assert outputs[-1].prompt_token_ids == ids and check(outputs[-1:]) > 0


def test_outputs_have_no_experts_when_the_option_is_off() -> None:
    with open_llm("float32", enable_return_routed_experts=False) as llm:
        assert generate(llm)[0].outputs[0].routed_experts is None


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("llama", {}, "mixtures of experts"),
        ("glm4_moe", {}, "largest logits alone"),
        ("qwen3_moe", {"speculative_config": {"method": "ngram"}}, "speculative_config"),
    ],
)
def test_returning_experts_is_refused_where_unsupported(
    architecture: str, settings: dict[str, Any], named: str
) -> None:
    given = {"enable_return_routed_experts": True, "kv_cache_memory_bytes": 1 << 20} | settings
    with pytest.raises(ConfigError, match=named) as raised:
        LLM(str(checkpoint(architecture, VOCAB)), disable_log_stats=True, **given)
    assert "remove it" in str(raised.value)


@needs_core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moe_logprobs_are_bitwise_equal_to_the_engines(dtype: str) -> None:
    """With replayed experts and without, since equal weights choose equal experts."""
    model = TrainingModel(str(checkpoint("qwen3_moe", VOCAB)), dtype=dtype)
    with open_llm(dtype) as llm:
        samples = Samples.of(generate(llm, n=2, logprobs=0))
    assert samples.routes is not None
    with torch.no_grad():
        assert torch.equal(model(samples.prompts, samples.responses), samples.logprobs)
        replayed = model(samples.prompts, samples.responses, samples.routes)
    assert torch.equal(replayed, samples.logprobs)


def sampled(routes: Any, num_prompt: int = 2, num_tokens: int = 2) -> RequestOutput:
    """Return the output of a request, with equal token ids and log-probabilities of -1."""
    logprobs = [{3: Logprob(-1.0)} for _ in range(num_tokens)]
    sample = CompletionOutput(0, "", [3] * num_tokens, -1.0, logprobs)
    sample.routed_experts = routes
    return RequestOutput("7", None, [1] * num_prompt, None, [sample])


@needs_core
def test_an_empty_sample_keeps_the_routes_of_other_samples() -> None:
    """A request aborted before its first token has unknown experts and no log-probabilities,
    whatever the length of its prompt."""
    good = np.tile(np.arange(NUM_CHOSEN, dtype=np.int16), (3, NUM_MIXTURES, 1))
    whole = sampled(good)
    aborted = [sampled(None, num_prompt, 0) for num_prompt in (1, 2, 5)]
    samples = Samples.of([aborted[0], whole, *aborted[1:]])
    assert samples.routes is not None and samples.lengths == [0, 2, 0, 0]
    assert [len(each) for each in samples.routes] == [1, 3, 1, 4]
    assert (samples.routes[3] == -1).all() and (samples.routes[1] == good).all()
    model = TrainingModel(str(checkpoint("qwen3_moe", VOCAB)))
    with torch.no_grad():
        found = model(samples.prompts, samples.responses, samples.routes)
        assert torch.equal(found, model([[1, 1]], [[3, 3]], [good]))
    assert Samples.of(aborted).routes is None
    with pytest.raises(RequestError, match="sample 1 has no experts"):
        Samples.of([whole, sampled(None)])


def own_reference(path: Path) -> Any:
    """Return a copy of transformers' model for hooks and gradients. Tests share the original."""
    return copy.deepcopy(reference_model(path))


def force_experts(model: Any, routes_TLC: torch.Tensor) -> None:
    """Make transformers' MoE layers use these experts in the next forward pass."""
    gates = [each for name, each in model.named_modules() if name.endswith("mlp.gate")]
    for gate, ids_TC in zip(gates, routes_TLC.unbind(1), strict=True):

        def choose(_: Any, __: Any, out: Any, ids_TC: torch.Tensor = ids_TC) -> Any:
            return out[0], out[0].gather(-1, ids_TC).softmax(-1), ids_TC

        gate.register_forward_hook(choose)


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Return a transformers model's log-probabilities of all tokens but the first 4."""
    logits = model(torch.tensor([ids[:-1]])).logits[0, 3:]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(ids[4:])[:, None])[:, 0]
    return found


def check_gradients(
    model: TrainingModel, other: Any, found: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Compare all parameters' gradients of a weighted sum of log-probabilities."""
    factors = torch.linspace(-1, 1, len(found))
    (found * factors).sum().backward()
    (wanted * factors).sum().backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        before, _, expert = name.partition(".mlp.experts.")
        number, _, part = expert.partition(".")
        if not expert:
            wanted_grad = theirs[name].grad
        elif part == "down_proj.weight":
            wanted_grad = theirs[f"{before}.mlp.experts.down_proj"].grad[int(number)]
        else:
            both = theirs[f"{before}.mlp.experts.gate_up_proj"].grad[int(number)]
            wanted_grad = both.chunk(2)[part == "up_proj.weight"]
        assert parameter.grad is not None and wanted_grad is not None
        assert (parameter.grad - wanted_grad).norm() <= 1e-4 * wanted_grad.norm() + 1e-9, name


@needs_core
def test_replayed_experts_give_transformers_logprobs_and_gradients() -> None:
    """With random experts, which no router would choose."""
    path = checkpoint("qwen3_moe", VOCAB)
    model, other = TrainingModel(str(path), dtype="float32"), own_reference(path)
    ids = prompts()[0]
    numbers = np.random.default_rng(2)
    routes = np.argsort(numbers.random((len(ids) - 1, NUM_MIXTURES, 8)))[..., :NUM_CHOSEN]
    found = model([ids[:4]], [ids[4:]], [routes.astype(np.int16)])
    force_experts(other, torch.from_numpy(routes))
    wanted = logprobs_of(other, ids)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        free = model([ids[:4]], [ids[4:]])
    assert (found - free).abs().max() > 1e-3
    check_gradients(model, other, found, wanted)


@needs_core
def test_unnormalised_expert_weights_match_transformers_gradients() -> None:
    """Without norm_topk_prob, the softmax covers all experts, so the weights of the chosen ones do
    not add up to 1."""
    path = changed("qwen3_moe", 2)
    config = json.loads((path / "config.json").read_text("utf-8"))
    assert config["norm_topk_prob"]
    (path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}), "utf-8")
    model, other, ids = (
        TrainingModel(str(path), dtype="float32"),
        own_reference(path),
        prompts()[0],
    )
    found, wanted = model([ids[:4]], [ids[4:]]), logprobs_of(other, ids)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    check_gradients(model, other, found, wanted)


@needs_core
def test_invalid_routes_are_refused() -> None:
    model = TrainingModel(str(checkpoint("qwen3_moe", VOCAB)))
    good = np.tile(np.arange(NUM_CHOSEN, dtype=np.int16), (3, NUM_MIXTURES, 1))
    for routes, message in (
        ([], "0 for 1 samples"),
        ([good[:, :1]], "shape"),
        ([np.concatenate([good, good])], r"but need \(3, 2, 3\)"),
        ([good + 7], "from 0 to 7"),
        ([np.zeros_like(good)], "must differ"),
    ):
        with pytest.raises(RequestError, match=message):
            model([[1, 2]], [[3, 4]], routes)
    with pytest.raises(RequestError, match="norm_topk_prob"):
        TrainingModel("demo")([[1, 2]], [[3, 4]], [good])


def test_later_token_values_replace_earlier_ones() -> None:
    pieces = [
        TokenValues(1, (1, 2), np.array([1, 2, 3, 4], np.int16)),
        TokenValues(2, (1, 2), np.array([5, 6, 7, 8, 9, 9], np.int16)),
    ]
    found = joined(pieces, 4)
    assert found is not None
    assert found[:, 0].tolist() == [[-1, -1], [1, 2], [5, 6], [7, 8]]
    assert joined([], 4) is None
