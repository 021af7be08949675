"""Starts without torch give bit-identical tokens and blocks to starts with it. Torch is imported
on the first call that needs it. Covers the whole folder, with `runner/warm/save_start.py`,
`runner/warm/start_file.py` and `runner/warm/array_ops.py`."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import FakeClock
from quire.base.messages import Abort, Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.base.step_outputs import SequenceUpdate
from quire.engine.attachments.loading import Loading
from quire.engine.client.output import StepReader
from quire.engine.start.build import BuiltCore, build_core
from quire.models.checkpoint.source import resolve_model
from quire.models.load.cache_files import STARTS, WEIGHTS, weight_cache
from quire.ops.host.native import core
from quire.runner.model_runner import ModelRunner
from quire.runner.warm import start_file
from quire.runner.warm.conditions import path_for
from quire.runner.warm.model import LOAD_S, WarmModel, start_warm
from quire.runner.warm.warm_runner import WarmRunner
from tests.support.cases import slow_but
from tests.support.engine.attachments import attached
from tests.support.engine.updates import error_of, read
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.gguf_writer import Q8_0, convert
from tests.support.processes.forks import run_forked

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

MAX_LEN = 64
SIMPLE: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 4, "max_num_seqs": 8}
# Little memory and chunked prompts: rows are preempted, resume and share blocks.
SHORT = SIMPLE | {"num_blocks": 18, "max_num_batched_tokens": 11}
STEADY = ["llama", "gpt_oss", "gemma3"]
OTHERS = ["gpt2", "qwen3_moe", "qwen2", "qwen3_moe_window", "phi3", "glm4", "gpt_neox", "opt"]
OTHERS += ["olmo2", "smollm3_windows", "cohere2", "mixtral", "qwen2_moe", "granite", "mistral"]


class Run:
    """A core, with the tokens and updates of its requests."""

    def __init__(self, folder: Path, cache: Path, **settings: Any) -> None:
        self.config = config_of(folder, cache, **settings)
        self.built: BuiltCore = build_core(self.config, resolve_model(str(folder)), FakeClock())
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.updates: list[SequenceUpdate] = []
        self._reader = StepReader()

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        given = {"max_tokens": 9, "ignore_eos": True} | params
        stops = tuple(range(3, 90)) if "min_tokens" in params else ()
        sampling = SamplingParams(**given)
        self.built.core.add(Request(name, prompt, sampling, seed=5, stop_token_ids=stops))

    def step(self) -> None:
        for update in read(self._reader, self.built.core.step()):
            self.tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            self.updates.append(update)
        self.built.core.scheduler.check_invariants()

    def wait_loaded(self) -> None:
        """Wait until the load that a parked request needs has ended."""
        loading = attached(self.built.core, Loading)
        if loading is not None and loading._thread is not None:
            loading._thread.join()

    def finish(self) -> "Run":
        while self.built.core.has_work:
            self.step()
        return self

    def blocks(self) -> list[bytes]:
        """Return all bytes of keys and values."""
        model = self.built.core.executor._built  # type: ignore[attr-defined]
        if isinstance(model, WarmModel):
            return [each.tobytes() for each in model.runner.backend.data]
        memory = model.runner.backend._memory
        return [kv.contiguous().view(-1).view(np_bytes()).numpy().tobytes() for kv in memory.kv]

    @property
    def warm(self) -> WarmModel | None:
        """The model of a saved start, or None."""
        found = self.plain
        return found if found is not None and found.runner.mapped else None

    @property
    def plain(self) -> WarmModel | None:
        """The model that runs plain plans without torch, or None."""
        model = self.built.core.executor._built  # type: ignore[attr-defined]
        return model if isinstance(model, WarmModel) else None


def np_bytes() -> Any:
    import torch

    return torch.uint8


def config_of(folder: Path, cache: Path, **settings: Any) -> EngineConfig:
    settings = {"model": str(folder), "weight_cache": str(cache), **SIMPLE, **settings}
    num_blocks = settings.pop("num_blocks", None)
    if num_blocks is not None:
        probe = config_of(folder, Path("off"), **settings)
        settings["kv_cache_memory_bytes"] = num_blocks * block_bytes(probe)
    settings["weight_cache"] = "off" if str(cache) == "off" else str(cache)
    return config_from_flat(disable_log_stats=True, **settings)


def block_bytes(config: EngineConfig) -> int:
    from quire.runner.derive import derive_config
    from quire.runner.memory_plan import block_bytes_of
    from quire.spec.model_spec import load_spec

    spec = load_spec(Path(config.model.model))
    return sum(block_bytes_of(derive_config(config, spec, "cpu"), spec))


def programs(run: Run, vocab: int, seed: int) -> Run:
    """Run requests of all plain kinds, which arrive while others run."""
    numbers = random.Random(seed)
    shared = random_tokens(17, seed=seed)[0]
    for i in range(9):
        prompt = shared[: numbers.randrange(1, 17)] + [numbers.randrange(3, vocab)]
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.3, "seed": i},
            {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "seed": i},
            {"temperature": 1.1, "min_p": 0.05, "n": 2},
            {"temperature": 0.8, "n": 3, "top_p": 0.7},
        ]
        run.add(f"r{i}", prompt, max_tokens=numbers.randrange(1, 14), **kinds[i % len(kinds)])
        for _ in range(numbers.randrange(4)):
            run.step()
    return run.finish()


def assert_same_results(folder: Path, cache: Path, vocab: int = 97, **settings: Any) -> None:
    """Compare a run with torch only, a first start, and a start without torch."""
    cold = programs(Run(folder, Path("off"), **settings), vocab, 3)
    first = programs(Run(folder, cache, **settings), vocab, 3)
    warm = programs(Run(folder, cache, **settings), vocab, 3)
    assert cold.plain is None
    assert first.plain is not None and first.warm is None and first.plain.has_torch
    assert warm.warm is not None and not warm.warm.has_torch
    assert warm.tokens == first.tokens == cold.tokens and len(cold.tokens) > 9
    assert warm.blocks() == first.blocks() == cold.blocks()


def each_variant() -> list[Any]:
    return slow_but([*STEADY, *OTHERS], *STEADY)


@pytest.mark.parametrize("name", each_variant())
def test_start_without_torch_gives_the_same_tokens_and_blocks(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", name)
    assert_same_results(tmp_path / "model", tmp_path / "cache", **SHORT)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        {"quantization": "int4", "dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        pytest.param({"dtype": "float16"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_formats_give_the_same_tokens_and_blocks(settings: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3")
    assert_same_results(tmp_path / "model", tmp_path / "cache", **SHORT, **settings)


def test_gguf_file_gives_the_same_tokens_and_blocks(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    path = convert(checkpoint.directory, tmp_path / "model.gguf", Q8_0)
    settings = {key: value for key, value in SHORT.items() if key != "num_blocks"}
    assert_same_results(path, tmp_path / "cache", **settings, kv_cache_memory_bytes=1 << 16)


# ---- requests that need torch --------------------------------------------------------------------

NEED_TORCH: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {40: 3.0, 41: -100.0}},
    "least": {"min_tokens": 5},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.01},
    "named": {"logprobs": 0, "logprob_token_ids": [5, 6]},
    "beams": {"use_beam_search": True, "n": 2, "beam_width": 3, "temperature": 0.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Yield a checkpoint, and a cache with its start."""
    place = tmp_path_factory.mktemp("warm")
    write_checkpoint(place / "model", "qwen3")
    Run(place / "model", place / "cache")
    yield place / "model", place / "cache"


@pytest.mark.parametrize("name", slow_but(NEED_TORCH, *tuple(NEED_TORCH)[::2]))
def test_running_rows_continue_when_torch_is_loaded(name: str, model: tuple[Path, Path]) -> None:
    """Rows of all plain kinds, including forks, run when a request needs torch."""
    folder, cache = model

    def run(cache: Path) -> Run:
        made = Run(folder, cache)
        first, second, third, fourth = random_tokens(9, 14, 5, 6, seed=2)
        made.add("greedy", first, temperature=0.0)
        made.add("random", second, temperature=1.2, top_k=9, seed=3)
        made.add("forks", third, temperature=1.0, n=3)
        for _ in range(4):
            made.step()
        assert made.warm is None or not made.warm.has_torch
        made.add("more", fourth, **({"temperature": 1.0, "seed": 4} | NEED_TORCH[name]))
        made.wait_loaded()
        made.step()
        made.add("behind", first, temperature=0.7)
        return made.finish()

    cold, warm = run(Path("off")), run(cache)
    assert warm.warm is not None and warm.warm.has_torch
    assert warm.tokens == cold.tokens
    for mine, theirs in zip(warm.updates, cold.updates, strict=True):
        assert repr(mine) == repr(theirs)


def mixed(folder: Path, cache: Path, seed: int) -> Run:
    """Run requests of all kinds, plain or not, which arrive and end while others run."""
    run, numbers = Run(folder, cache, **SHORT), random.Random(seed)
    shared = random_tokens(17, seed=seed)[0]
    for i in range(16):
        more = {} if numbers.random() < 0.6 else NEED_TORCH[numbers.choice(list(NEED_TORCH))]
        prompt = shared[: numbers.randrange(1, 17)] + [numbers.randrange(3, 97)]
        plain = {"temperature": numbers.choice([0.0, 1.2]), "n": numbers.choice([1, 1, 3])}
        if "use_beam_search" not in more and plain["temperature"] == 0.0:
            plain["n"] = 1
        run.add(f"r{i}", prompt, **(plain | {"seed": i, "max_tokens": 5 + i % 9} | more))
        run.wait_loaded()
        if not numbers.randrange(3):
            run.finish()
        for _ in range(numbers.randrange(4)):
            run.step()
        if not numbers.randrange(6):
            run.built.core.control(Abort(f"r{i}"))
    return run.finish()


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(each, marks=pytest.mark.slow) for each in range(3, 20))]
)
def test_plain_plans_run_without_torch_between_other_plans(
    seed: int, model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runners alternate over the same rows and give the tokens of one. Even seeds have a first
    start, odd ones a later start."""
    folder, cache = model[0], model[1] if seed % 2 else tmp_path
    launched, launch, whole_launch = list[str](), WarmRunner.launch, ModelRunner.launch
    cold = mixed(folder, Path("off"), seed)
    monkeypatch.setattr(
        WarmRunner, "launch", lambda *given: launched.append("plain") or launch(*given)
    )
    monkeypatch.setattr(
        ModelRunner, "launch", lambda *given: launched.append("any") or whole_launch(*given)
    )
    warm = mixed(folder, cache, seed)
    assert warm.tokens == cold.tokens
    for mine, theirs in zip(warm.updates, cold.updates, strict=True):
        assert repr(mine) == repr(theirs)
    assert warm.blocks() == cold.blocks()
    changes = sum(a != b for a, b in pairwise(launched))
    assert changes > 1 and launched.count("plain") > 5 and launched.count("any") > 5


def test_plain_rows_never_wait_for_torch(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch loads while the plain request runs. No step waits for it; each phase is reported."""
    is_loading, may_end = threading.Event(), threading.Event()
    build, phases = WarmModel._build, list[float]()

    def slow(self: WarmModel) -> Any:
        is_loading.set()
        assert may_end.wait(30)
        return build(self)

    run = Run(*model)
    assert run.warm is not None
    run.warm.progress.listener = phases.append
    monkeypatch.setattr(WarmModel, "_build", slow)
    run.add("plain", [3, 4, 5], temperature=0.0, max_tokens=30)
    run.step()
    run.add("more", [6, 7], temperature=0.0, logprobs=1, max_tokens=3)
    assert is_loading.wait(30)
    for _ in range(40):
        run.step() if run.built.core.scheduler.num_running else run.built.core.advance()
    assert len(run.tokens["plain", 0]) == 30 and ("more", 0) not in run.tokens
    assert not run.warm.has_torch and phases == [LOAD_S]
    may_end.set()
    run.finish()
    assert len(run.tokens["more", 0]) == 3 and run.warm.has_torch
    assert phases == [LOAD_S, 0.0]


def test_failed_load_fails_the_waiting_requests_and_is_retried(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: WarmModel) -> Any:
        raise OSError("no torch here")

    run = Run(*model)
    run.add("plain", [3, 4, 5], temperature=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(WarmModel, "_build", broken)
        run.add("more", [6, 7], temperature=0.0, logprobs=1)
        run.finish()
    [error] = [text for each in run.updates if (text := error_of(each))]
    assert "cannot be loaded: OSError: no torch here" in error
    assert len(run.tokens["plain", 0]) == 9
    run.add("again", [6, 7], temperature=0.0, logprobs=1)
    run.finish()
    assert len(run.tokens["again", 0]) == 9


def test_request_aborted_during_the_load_is_dropped(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, build = threading.Event(), WarmModel._build
    monkeypatch.setattr(WarmModel, "_build", lambda self: may_end.wait(30) and build(self))
    run = Run(*model)
    run.add("more", [6, 7], temperature=0.0, logprobs=1)
    run.built.core.control(Abort("more"))
    loading = attached(run.built.core, Loading)
    assert loading is not None and loading.pending.num_open == 1 and not loading._waiting
    may_end.set()
    run.finish()
    run.wait_loaded()
    assert loading.answers(0.0) == []


def test_unannounced_plan_loads_torch_within_its_step(model: tuple[Path, Path]) -> None:
    run = Run(*model)
    assert run.warm is not None
    phases = list[float]()
    run.warm.progress.listener = phases.append
    loading = attached(run.built.core, Loading)
    assert loading is not None
    run.built.core.detach(loading)
    run.add("more", [6, 7], temperature=0.0, logprobs=1)
    assert len(run.finish().tokens["more", 0]) == 9
    assert run.warm.has_torch and phases == [LOAD_S, 0.0]


def test_model_with_capped_logits_always_starts_with_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "gemma2")
    for _ in range(2):
        run = Run(tmp_path / "model", tmp_path / "cache")
        run.add("one", [4, 5, 6], temperature=0.0)
        assert run.finish().warm is None and len(run.tokens["one", 0]) == 9


@pytest.mark.slow
def test_grammar_loads_torch(first_answer: str) -> None:
    """The test uses `LLM`, since a grammar needs a tokenizer. Running rows keep their tokens."""
    code = """
import sys
from quire import LLM, SamplingParams, StructuredOutputsParams
with LLM("demo", max_model_len=100, disable_log_stats=True) as llm:
    plain = llm.generate(["The fox"], SamplingParams(max_tokens=5, temperature=0.0), use_tqdm=False)
    before = "torch" in sys.modules
    regex = StructuredOutputsParams(regex="[a-c]{4}")
    asked = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=regex)
    both = llm.generate(["The fox", "a"], [SamplingParams(max_tokens=5, temperature=0.0), asked],
                        use_tqdm=False)
    assert both[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert len(both[1].outputs[0].text) == 4, both[1].outputs[0].text
    print(before, "torch" in sys.modules)
"""
    assert run_python(code) == "False True\n"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ANSWER = """
import sys
from quire.cli.main import main
main(["generate", "Hello", "--max-tokens", "3", "--max-model-len", "100"])
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def first_answer() -> str:
    """Return the output of the first process, which saves a start without torch for later ones. It
    may have imported torch before."""
    done = run_forked([sys.executable, "-c", ANSWER], timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_second_process_answers_without_torch(first_answer: str) -> None:
    first, second = first_answer, run_python(ANSWER)
    assert second.endswith("False\n")
    assert first.splitlines()[:-1] == second.splitlines()[:-1]


# ---- failing steps -------------------------------------------------------------------------------


def test_repeated_step_forks_once(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt fails after everything but the counters has changed."""
    folder, cache = model
    launch, finish, failed = WarmRunner.launch, WarmRunner.finish, set[int]()
    step_ids = list[int]()

    def launching(self: WarmRunner, plan: Plan, masks: Any = None) -> Any:
        step_ids.append(plan.step_id)
        return launch(self, plan, masks)

    def troubled(self: WarmRunner, *arguments: Any) -> Any:
        computed = self.rows.state.computed_R.copy()
        found = finish(self, *arguments)
        if step_ids[-1] not in failed:
            failed.add(step_ids[-1])
            self.rows.state.computed_R[:] = computed
            raise RuntimeError("made to fail")
        return found

    expected = programs(Run(folder, cache, **SHORT), 97, 4).tokens
    monkeypatch.setattr(WarmRunner, "launch", launching)
    monkeypatch.setattr(WarmRunner, "finish", troubled)
    assert programs(Run(folder, cache, **SHORT), 97, 4).tokens == expected
    assert len(failed) > 5


def test_nonfinite_logits_fail_their_row_alone(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = model
    logits = WarmRunner.logits

    def poisoned(self: WarmRunner, *arguments: Any) -> Any:
        found = logits(self, *arguments)
        found[0, 3] = np.nan
        return found

    run = Run(folder, cache)
    monkeypatch.setattr(WarmRunner, "logits", poisoned)
    run.add("first", [4, 5, 6], temperature=0.0)
    run.add("second", [7, 8, 9], temperature=0.0)
    run.step()
    monkeypatch.undo()
    run.finish()
    errors = {update.request_id: error_of(update) for update in run.updates}
    assert "not finite" in errors["first"] and errors["second"] == ""
    assert len(run.tokens["second", 0]) == 9


# ---- saved starts --------------------------------------------------------------------------------


def warm_of(folder: Path, cache: Path, **settings: Any) -> WarmModel | None:
    return start_warm(config_of(folder, cache, **settings), resolve_model(str(folder)))


def test_start_is_not_used_with_other_settings_or_sources(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = model
    assert warm_of(folder, cache) is not None
    for settings in (
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"speculative_config": '{"method": "ngram"}'},
        {"attention_backend": "torch"},
        {"pipeline_depth": 2},
        {"kv_host_gb": 0.01},
    ):
        assert warm_of(folder, cache, **settings) is None, settings
    own = start_file._own_files()
    assert any(name == "/runner/warm/array_ops.py" for name, _, _ in own)
    changed = (*own[1:], ("x.py", 1, 1))
    monkeypatch.setattr(start_file, "_own_files", lambda: changed)
    assert warm_of(folder, cache) is None


def test_changed_checkpoint_invalidates_the_start(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    write_checkpoint(folder, "llama")
    Run(folder, cache)
    assert warm_of(folder, cache) is not None
    write_checkpoint(folder, "llama", "10KB")
    assert warm_of(folder, cache) is None


@pytest.mark.parametrize("damaged", ["start", "weights", "no weights", "nothing"])
def test_damaged_start_is_not_used(
    damaged: str, model: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = model[0], tmp_path / "cache"
    Run(folder, cache)
    (start,), (weights,) = cache.glob(f"*{STARTS}"), cache.glob(f"*{WEIGHTS}")
    if damaged == "start":
        raw = bytearray(start.read_bytes())
        raw[100] ^= 255
        start.write_bytes(raw)
    elif damaged == "weights":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damaged == "no weights":
        weights.unlink()
    assert (warm_of(folder, cache) is None) == (damaged != "nothing")
    assert ("is not used" in caplog.text) == (damaged in ("start", "weights"))
    again = Run(folder, cache).finish()
    assert (again.warm is None) == (damaged != "nothing")
    assert warm_of(folder, cache) is not None  # it was written again


def test_start_of_random_weights_is_not_saved(model: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(model[0], tmp_path, load_format="dummy")
    assert path_for(config, resolve_model(str(model[0]))) is None
    assert weight_cache("off") is None
    assert path_for(config_of(model[0], Path("off")), resolve_model(str(model[0]))) is None


def test_loading_torch_reuses_blocks_and_rows(model: tuple[Path, Path]) -> None:
    """The full runner uses the same memory for blocks and rows."""
    run = Run(*model)
    assert run.warm is not None
    run.add("plain", [3, 4, 5, 6, 7], temperature=0.0, max_tokens=20)
    run.step()
    run.add("more", [3, 4, 5], temperature=0.0, logprobs=1, max_tokens=2)
    run.finish()
    whole = run.warm._whole
    assert whole is not None
    rows, memory = whole.runner.rows.state, whole.runner.backend._memory  # type: ignore[attr-defined]
    assert rows.tokens_RM.data_ptr() == run.warm.runner.rows.state.tokens_RM.ctypes.data
    assert memory.kv[0].data_ptr() == run.warm.runner.backend.data[0].ctypes.data
    assert whole.memory == run.built.memory
    assert whole.runner.rows.forks is run.warm.runner.rows.forks  # a repeated step forks once


def test_result_reports_its_duration(model: tuple[Path, Path]) -> None:
    warm = warm_of(*model)
    assert warm is not None
    found: StepResult = warm.run(Plan(step_id=3))
    assert found.step_id == 3 and found.duration_s > 0 and found.token_ids.shape == (0, 1)
    assert found.error is None


def test_core_sleeps_and_wakes_with_and_without_torch(model: tuple[Path, Path]) -> None:
    """Without torch, the weights stay mapped from their file. Torch's weights load again."""
    run = Run(*model)
    assert run.warm is not None
    sleeping, prompt = run.built.sleeping, random_tokens(20, seed=2)[0]
    run.add("before", prompt)
    run.finish()
    for index in range(3):
        ended: list[str | None] = []
        sleeping.begin(2, True, ended.append)
        run.step()
        assert ended == [None] and sleeping.is_sleeping
        sleeping.wake(["weights", "kv_cache"], ended.append)
        run.built.updates.wait()
        while len(ended) < 2:
            run.step()
        assert ended == [None, None] and not sleeping.is_sleeping
        assert run.warm.has_torch == (index == 2)
        run.add(f"after {index}", prompt)
        if index == 1:
            run.add("torch", prompt, logprobs=1)
            run.wait_loaded()
        run.finish()
        assert run.tokens[f"after {index}", 0] == run.tokens["before", 0]
    assert run.tokens["torch", 0] == run.tokens["before", 0]
