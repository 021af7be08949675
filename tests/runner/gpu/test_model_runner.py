"""A runner whose device runs everything long after the launch, against one on the host.

Plans are launched as far ahead as the scheduler allows. Nothing runs before a result is requested.
So pinned slots, rows and results are reused while all launches are pending.
"""

from collections import Counter, deque
from collections.abc import Callable, Set
from typing import Any

import pytest
import torch

from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.client.output import StepReader
from quire.engine.loop.recovery import combine
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint import formats
from quire.models.checkpoint.source import resolve_model
from quire.ops import gpu
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.build import build_runner
from quire.runner.gpu import slots
from quire.runner.gpu.pieces import Pieces
from quire.runner.setup.built import BuiltRunner
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.cases import slow_but
from tests.support.engine.updates import read
from tests.support.models.reference_checkpoints import checkpoint, shallow
from tests.support.runner.late_device import LateDevice, on_the_host
from tests.support.runner.row_masks import allowed, with_masks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 20,
    "block_size": 4,
    "pipeline_depth": 6,
    "kv_cache_memory_bytes": 40 * 2 * 2 * 2 * 4 * 8 * 8,
    "max_model_len": 40,
}


def model_of(architecture: str = "llama") -> str:
    """Return a model. Llama has equal layers and gets only one, for half the time."""
    whole = str(checkpoint(architecture))
    return str(shallow(whole, 1)) if architecture == "llama" else whole


def build(backend: str, architecture: str = "llama", **settings: Any) -> BuiltRunner:
    path = model_of(architecture)
    config = config_from_flat(model=path, attention_backend=backend, **SETTINGS | settings)
    return build_runner(config, resolve_model(path, None))


def requests(num_more: int = 0) -> list[Request]:
    """num_more: additional tokens of each request."""
    found = []
    for i in range(6):
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            presence_penalty=0.5 * (i % 3),
            max_tokens=4 + i + num_more,
            n=2 if i == 4 else 1,
            ignore_eos=True,
        )
        prompt = [(11 * i + 3 * j) % 97 for j in range(5 + 4 * (i % 4))]
        found.append(Request(f"r{i}", prompt, params, seed=i))
    return found


def two() -> list[Request]:
    """A sampled request, and a greedy one with a penalty."""
    return requests()[:2]


def first_four() -> list[Request]:
    """Requests that partly end while other prompts are still computed."""
    return requests(num_more=1)[:4]


def all_but_the_last() -> list[Request]:
    return requests(num_more=1)[:5]


def drive(
    built: BuiltRunner,
    device: LateDevice | None = None,
    masked: Set[str] = frozenset(),
    make: Callable[[], list[Request]] = requests,
    architecture: str = "llama",
) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of all sequences. Plans are launched as far ahead as possible. masked:
    requests whose rows have masks."""
    scheduler = make_scheduler(built, resolve_model(model_of(architecture), None))
    for request in make():
        scheduler.add(request, 0.0)
    in_flight: deque[Any] = deque()
    tokens: dict[tuple[str, int], list[int]] = {}
    reader = StepReader()
    while scheduler.has_work:
        while (plan := scheduler.schedule(0.0).plan) is not None:
            vocab_size = built.runner.sampler.vocab_size
            plan, promise = with_masks(scheduler, plan, masked, vocab_size)
            in_flight.append((plan, built.runner.launch(plan, promise)))
        if device is not None and len(in_flight) > 1:
            assert not in_flight[-1][1].is_done(), "no work runs before its result is requested"
        plan, pending = in_flight.popleft()
        result = pending.end() if len(plan.rows) else combine(plan, [])
        outputs = scheduler.update(result, 0.0).outputs
        assert not result.row_errors
        for update in read(reader, outputs):
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    return tokens


@pytest.mark.parametrize("room", slow_but(("large", "small"), "small"))
def test_plans_launched_far_ahead_give_the_tokens_of_torch(
    room: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small slots, one plan's changes need several slots, and the ring is often full."""
    if room == "small":
        monkeypatch.setattr(slots, "MAX_TOKENS", 7)
        monkeypatch.setattr(slots, "MAX_DELTAS", 9)
        monkeypatch.setattr(slots, "MAX_RUNS", 2)
        monkeypatch.setattr(slots, "NUM_SLOTS", 3)
        monkeypatch.setattr(slots, "MAX_RUN_TOKENS", 5)
    built = build("triton")
    found = drive(built, devices[-1] if room == "large" else None)
    assert devices[-1].most_waiting >= (5 if room == "large" else 2)
    with on_the_host():
        assert found == drive(build("torch"))
    assert sum(len(tokens) for tokens in found.values()) == sum(4 + i for i in range(6)) + 8


@pytest.mark.parametrize("quantization", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_quantised_products_are_recorded_without_reading_values(
    quantization: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(formats, "check_quantization", lambda *_: None)  # it needs the C++ core
    weights = {"quantization": quantization}
    found = drive(build("triton", compilation="full", **weights), devices[-1], make=two)
    assert found == drive(build("triton", enforce_eager=True, **weights), devices[-1], make=two)


@pytest.mark.slow
@pytest.mark.parametrize("compilation", ["full", "piecewise"])
def test_layers_with_states_are_recorded_without_reading_values(
    compilation: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes mixed steps, whose rows have other lengths than when they were recorded."""
    replays, begin = [], Pieces.begin
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(Pieces, "begin", lambda pieces: (replays.append(pieces), begin(pieces)))
    hybrid: dict[str, Any] = {"architecture": "qwen3_5"}
    settings = hybrid | {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 60}
    make = first_four
    found = drive(
        build("triton", compilation=compilation, **settings), devices[-1], make=make, **hybrid
    )
    assert len(replays) > 5
    with on_the_host():
        monkeypatch.undo()
        assert found == drive(build("torch", **settings), make=make, **hybrid)


MASKED = {"r0", "r3", "r4"}
WAYS: dict[str, dict[str, Any]] = {
    "as they are": {"enforce_eager": True},
    "recorded whole": {"compilation": "full"},
    "recorded in pieces": {"compilation": "piecewise"},
    "torch": {"backend": "torch"},
}


@pytest.mark.parametrize("way", slow_but(WAYS, "recorded whole"))
def test_masked_steps_launched_far_ahead_give_the_tokens_of_torch(
    way: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mask slots are reused while copies from them are pending. Sequences without masks get the
    same tokens as in a batch without masks."""
    num_cuts: Counter[int] = Counter()
    begin = Pieces.begin

    def count(pieces: Pieces) -> None:
        num_cuts[pieces.num_before] += 1
        begin(pieces)

    monkeypatch.setattr(Pieces, "begin", count)
    settings = {"backend": "triton", "max_model_len": 60} | WAYS[way]
    built = build(**settings)
    requests_of = all_but_the_last
    found = drive(built, devices[-1], MASKED, requests_of)
    with on_the_host():
        assert found == drive(build("torch", max_model_len=60), None, MASKED, requests_of)
        plain = drive(build("torch", max_model_len=60), None, frozenset(), requests_of)
    vocab_size = built.runner.sampler.vocab_size
    prompts = {request.request_id: len(request.prompt_token_ids) for request in requests()}
    for (name, index), tokens in found.items():
        if name not in MASKED:
            assert tokens == plain[name, index]
            continue
        assert tokens != plain[name, index]
        for i, token in enumerate(tokens):
            assert allowed(name, index, prompts[name] + i, vocab_size)[token]
    is_recorded = "recorded" in way
    assert any(num > 0 for num in num_cuts) == is_recorded
    assert (1 in num_cuts) == (way == "recorded whole")


READS: list[Callable[[torch.Tensor], Any]] = [
    bool, int, range, lambda x: x.item(), lambda x: x.cpu(), lambda x: x.tolist()
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_late_device_detects_values_read_by_the_host(read: Callable[[torch.Tensor], Any]) -> None:
    device = LateDevice(torch.device("cpu"))
    value = torch.ones(1, dtype=torch.int64)
    arrival = device.run(lambda: [read(value)][1:])
    with pytest.raises(AssertionError, match="the host waits"):
        arrival.wait()
    assert read(value) is not None


def test_failed_launch_can_be_repeated(devices: list[LateDevice]) -> None:  # noqa: F811
    """A failure at the last launch changes no counters, and the retry gives the same token."""
    found = []
    for fails in (False, True):
        built = build("triton")
        runner = built.runner
        scheduler = make_scheduler(built, resolve_model(model_of(), None))
        scheduler.add(requests()[1], 0.0)
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        if fails:
            model, runner.model = runner.model, None  # type: ignore[assignment]
            with pytest.raises(TypeError):
                runner.launch(plan).end()
            runner.model = model
        found.append(runner.launch(plan).end().token_ids.tolist())
    assert found[0] == found[1]
