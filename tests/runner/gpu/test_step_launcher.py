"""The launcher of recorded steps, on a driver that is compiled here and executes by callbacks."""

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.base.errors import EngineError
from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.models.checkpoint.adapter_files import adapter_digest
from quire.ops.host.native import core
from quire.ops.kernels import row_deltas
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.kernels.step_inputs import Inbox
from quire.runner import device as device_module
from quire.runner.gpu import step_launcher
from quire.runner.gpu.cuda_device import CudaDevice
from quire.runner.gpu.slots import MAX_DELTAS, Chunk, SlotRing
from quire.runner.gpu.step_launcher import StepLauncher, arguments_of, make_launcher
from quire.runner.setup.assemble import empty_rows
from quire.runner.setup.built import BuiltRunner
from quire.runner.step_ops import Sampling, SamplingFlags, SamplingRequests, StepLists, merged
from tests.runner.gpu.test_kernel_ops import KINDS, run, run_on_the_host
from tests.runner.gpu.test_model_runner import build, drive, first_four, model_of, requests
from tests.support.runner.adapters import adaptable_shapes, write_adapter
from tests.support.runner.fake_cuda import FakeCuda
from tests.support.runner.fake_driver import (
    NEEDED,
    OF_A_STEP,
    Executed,
    FakeDriver,
    LaunchedDevice,
    compiled,
    launch_natively,
)
from tests.support.runner.late_device import on_the_host, stand_in, without_core

pytestmark = [NEEDED, pytest.mark.skipif(not INTERPRETED, reason="the memory is the CPU's")]

CPU = torch.device("cpu")


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> Iterator[list[LaunchedDevice]]:
    made = launch_natively(monkeypatch, fake)
    with without_core(monkeypatch):
        yield made


def one() -> list[Request]:
    """A request of many steps of one kind."""
    return requests(10)[:1]


def short() -> list[Request]:
    """The same request with few steps."""
    return requests(2)[:1]


class TestEngine:
    """The launcher gives torch's tokens, with a known number of driver calls."""

    def test_tokens_are_the_same(self, devices: list[LaunchedDevice]) -> None:
        built = build("triton", native_launch=True, compilation="full")
        found = drive(built, devices[-1], make=first_four)
        with on_the_host():
            assert found == drive(build("torch"), make=first_four)

    def test_steps_with_adapters_are_launched_natively(
        self, devices: list[LaunchedDevice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """While neither slots nor rows change, the graph needs no data from the host."""
        path = write_adapter(tmp_path / "adapter", adaptable_shapes(Path(model_of())), 3)
        adapter_id, num_launched = adapter_digest(path), [0]
        launch = StepLauncher.launch

        def counted(*args: Any) -> Any:
            num_launched[0] += 1
            return launch(*args)

        def make() -> list[Request]:
            first, second = requests(8)[:2]
            return [first, msgspec.structs.replace(second, adapter_id=adapter_id)]

        def build_with(backend: str, **settings: Any) -> BuiltRunner:
            built = build(backend, enable_lora=True, pipeline_depth=1, **settings)
            built.load_adapter(1, adapter_id, str(path))
            return built

        monkeypatch.setattr(StepLauncher, "launch", counted)
        built = build_with("triton", native_launch=True, compilation="full")
        found = drive(built, devices[-1], make=make)
        assert num_launched[0] > 4
        with on_the_host():
            assert found == drive(build_with("torch"), make=make)
            assert found != drive(build("torch"), make=lambda: requests(8)[:2])

    def test_step_takes_three_driver_calls(
        self, devices: list[LaunchedDevice], fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There are many steps, so that each slot and each entry of the mail is reused."""
        launches = Counter[str]()
        launch = StepLauncher.launch

        def counted(*args: Any) -> Any:
            before = fake.counts()
            arrival = launch(*args)
            made = Counter(fake.counts()) - Counter(before)
            launches["steps"] += 1
            made.pop("cuCtxSetCurrent", None)  # once for each thread
            assert made == dict.fromkeys(OF_A_STEP, 1)
            return arrival

        monkeypatch.setattr(StepLauncher, "launch", counted)
        built = build("triton", native_launch=True, compilation="full")
        found = [drive(built, devices[-1], make=one) for _ in range(2)]
        assert launches["steps"] > 2 * 8, "slots are reused"
        assert fake.counts().get("cuCtxSetCurrent", 0) <= 1 and "cuEventQuery" not in fake.counts()
        with on_the_host():
            assert found == 2 * [drive(build("torch"), make=one)]

    def test_steps_with_logprobs_are_launched_by_torch(
        self, devices: list[LaunchedDevice], fake: FakeDriver
    ) -> None:
        """Log-probabilities are copied from a graph's outputs. Native launches come between."""
        longer = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        params = [longer, KINDS["logprobs"][0]]
        found = run("triton", params, 2, native_launch=True, compilation="full")
        assert found == 2 * run_on_the_host(params, rounds=1)
        assert fake.counts()["cuGraphLaunch"] > 0

    def test_missing_driver_disables_native_launches(
        self, devices: list[LaunchedDevice], caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch, fake: FakeDriver,
    ) -> None:  # fmt: skip
        fake.path = "/no/such/libcuda.so"
        built = build("triton", native_launch=True, compilation="full")
        found = drive(built, make=short)
        assert "native_launch has no effect: the CUDA driver cannot be opened" in caplog.text
        assert not fake.counts()
        with on_the_host():
            assert found == drive(build("torch"), make=short)

    def test_step_of_a_refused_graph_can_be_repeated(
        self, devices: list[LaunchedDevice], fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A graph that the driver refuses fails its step and leaves the rows unchanged."""
        built = build("triton", native_launch=True, compilation="full")
        refused: list[str] = []
        launch = StepLauncher.launch

        def first_refused(*args: Any) -> Any:
            if not refused:
                fake.fail("cuGraphLaunch", 700)
                with pytest.raises(RuntimeError) as error:
                    launch(*args)
                fake.fail("cuGraphLaunch", 0)
                refused.append(str(error.value))
            return launch(*args)  # the same step again

        monkeypatch.setattr(StepLauncher, "launch", first_refused)
        found = drive(built, devices[-1], make=one)
        assert refused == ["cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS (700)"]
        with on_the_host():
            assert found == drive(build("torch"), make=one)


class TestCudaDevice:
    """The calls that torch makes for the launcher."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        made = FakeCuda()
        made.install(monkeypatch)
        return made

    def test_thread_is_claimed_once_for_each_device(self, cuda: FakeCuda) -> None:
        device = CudaDevice(torch.device("cuda"))
        device.claim_thread()
        assert cuda.log == [("stream 1", "waits for", "default")]
        assert cuda.current_stream().name == "stream 1"
        device.claim_thread()
        device.run(list).wait()
        assert len(cuda.log) == 1
        other = CudaDevice(torch.device("cuda"))  # another engine in this thread
        other.claim_thread()
        device.claim_thread()
        assert cuda.log[1:] == [
            ("stream 3", "waits for", "stream 1"),
            ("stream 1", "waits for", "stream 3"),
        ]

    def test_step_times_begin_after_the_previous_step(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = iter([10.0, 12.0, 13.0])
        monkeypatch.setattr(device_module.time, "perf_counter", lambda: next(times))
        device = CudaDevice(torch.device("cuda"))
        device.run(list).wait()  # no step
        arrival = device.run(lambda: [torch.zeros(1)])
        for _ in range(2):
            arrival.wait()
        assert device.clock.end(launched_s=9.0) == 2.0 and device.clock.end(launched_s=12.5) == 0.5

    def test_tokens_are_the_same(
        self, cuda: FakeCuda, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executed = Executed(fake, lambda work: work(), lambda address: cuda.graphs[address - 1])
        module = core()
        monkeypatch.setattr(step_launcher, "core", lambda: module)
        monkeypatch.setattr(step_launcher, "prepare_kernel", executed.prepare)
        monkeypatch.setattr(CudaDevice, "driver", fake.path)
        stand_in(monkeypatch, lambda device: CudaDevice(CPU))
        with without_core(monkeypatch):
            found = drive(build("triton", native_launch=True, compilation="full"), make=one)
            with on_the_host():
                assert found == drive(build("torch"), make=one)
        assert fake.counts()["cuGraphLaunch"] > 8
        kept_entries = [entry for entry in cuda.log if entry[1] == "keeps"]
        assert len(kept_entries) < 15, "tokens of launched steps are not copied"


MAX_ROWS = 200  # two flags


class Small:
    """A launcher without a model: only tests write to the mail, not graphs."""

    def __init__(self, fake: FakeDriver) -> None:
        self.device = LaunchedDevice(CPU, fake)
        self.state = empty_rows(CPU, MAX_ROWS, 64, 1, 4)
        self.inbox = Inbox.empty(MAX_ROWS, CPU)
        self.ring = SlotRing(self.device, MAX_ROWS)
        self.device.graphs.append(SimpleNamespace(replay=lambda: None))  # type: ignore[arg-type]
        self.launcher = StepLauncher(self.device, self.state, self.inbox, self.ring)
        self.slot = self.ring.take()

    def launch(self, num: int = 3, mail_slot: int = 0, chunk: Chunk | None = None) -> Any:
        rows = np.arange(num, dtype=np.int32)[::-1].copy()
        flags = SamplingFlags.of_rows(num)
        none = np.empty(0, np.int64)
        lists = StepLists(
            rows,
            np.full(num, 2, np.int32),
            Sampling(SamplingRequests(rows, flags), none, none),
            np.arange(num),
            mail_slot,
        )
        return self.launcher.launch(self.slot, chunk or Chunk(), lists, self.device.graphs[0])

    def write(self, ticket: int, *tokens: int, mail_slot: int = 0, flags: int = 2) -> None:
        """Write tokens and flags, as the kernel does."""
        words = self.launcher.mail.words_QW[mail_slot]
        words[: len(tokens)] = torch.tensor(tokens)
        words[MAX_ROWS : MAX_ROWS + flags] = ticket


@pytest.fixture
def small(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Small:
    devices_made: list[LaunchedDevice] = []

    def prepare(*args: Any) -> Any:
        return devices_made[-1].executed.prepare(*args)

    init = LaunchedDevice.__init__

    def noted(self: LaunchedDevice, *args: Any) -> None:
        init(self, *args)
        devices_made.append(self)

    monkeypatch.setattr(LaunchedDevice, "__init__", noted)
    monkeypatch.setattr(step_launcher, "prepare_kernel", prepare)
    return Small(fake)


class TestPlan:
    def test_slot_holds_the_plan(self, small: Small) -> None:
        """The slot has the layout that Python writes, and the kernel receives the counts."""
        tokens = np.array([5, 6, 7], np.int32)
        chunk = Chunk(np.array([[0, 1, 2, 9], [-1, 2, 0, 3]], np.int32))
        chunk.add(1, 4, tokens)
        small.launch(3, chunk=chunk)
        layout, array = small.ring.layout, small.slot.array
        assert array[:4].tolist() == [3, 3, 0, 1]
        at = array[8:]
        assert at[:3].tolist() == [2, 1, 0] and at[MAX_ROWS : MAX_ROWS + 3].tolist() == [2, 2, 2]
        assert at[2 * MAX_ROWS :][:6].tolist() == [2, 0, 1, 1, 0, 2]
        found = array[layout.deltas_at :][:8].reshape(2, 4).tolist()
        assert sorted(found) == sorted(chunk.deltas.tolist())
        assert array[layout.runs_at :][:4].tolist() == [1, 4, 0, 3]
        small.device.work_until(small.device.executed.last)
        assert small.inbox.words[:4].tolist() == [3, 3, 0, 1]
        assert small.state.tables_GRL[0, 1, 2] == 9
        assert small.state.tokens_RM[1, 4:7].tolist() == [5, 6, 7]

    def test_last_of_several_deltas_to_one_entry_is_written(self, small: Small) -> None:
        generator = np.random.default_rng(0)
        for num in (0, 1, 2, 7, 300, 3000):
            deltas = generator.integers(-1, 12, (num, 4), np.int32)
            small.launch(1, chunk=Chunk(deltas))
            found = small.slot.array[small.ring.layout.deltas_at :][: 4 * num].reshape(num, 4)
            expected = merged(deltas)
            assert sorted(map(tuple, found[: len(expected)])) == sorted(map(tuple, expected))

    def test_plan_that_exceeds_its_slot_is_refused(self, small: Small, fake: FakeDriver) -> None:
        with pytest.raises(RuntimeError, match="does not fit its slot"):
            small.launch(1, mail_slot=8)
        with pytest.raises(RuntimeError, match="does not fit its slot"):
            small.launch(MAX_ROWS + 1)
        with pytest.raises(RuntimeError, match="does not fit its slot"):
            small.launch(1, chunk=Chunk(np.zeros((MAX_DELTAS + 1, 4), np.int32)))
        with pytest.raises(RuntimeError, match="differ in length"):
            small.launch(1, chunk=Chunk(np.zeros((1, 3), np.int32)))
        assert "cuLaunchKernel" not in fake.counts()

    def test_tickets_are_unique(self, small: Small) -> None:
        found = [small.launch(1, mail_slot=i % 8)._where for i in range(20)]
        assert [ticket for _, ticket, _ in found] == list(range(1, 21))

    def test_missing_core_disables_the_launcher(
        self, small: Small, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(step_launcher, "core", lambda: None)
        assert make_launcher(small.device, small.state, small.inbox, small.ring) is None
        assert "the C++ core was not built" in caplog.text


class TestMail:
    def test_step_is_done_when_all_flags_are_written(self, small: Small) -> None:
        one, two = small.launch(128), small.launch(129, mail_slot=1)
        assert not one.is_done() and not two.is_done()
        small.write(1, 7, 8, flags=1)
        small.write(2, 9, mail_slot=1, flags=1)
        assert one.is_done() and not two.is_done()
        small.write(2, 9, mail_slot=1)
        assert two.wait()[0][0] == 9 and one.wait()[0][:2].tolist() == [7, 8]
        assert len(two.wait()[0]) == 129 and one.duration_s() > 0

    def test_read_tokens_survive_reuse_of_their_mail_slot(self, small: Small) -> None:
        arrival = small.launch(1)
        small.write(1, 5)
        assert arrival.is_done()
        small.write(9, 6)
        assert arrival.is_done() and arrival.wait()[0].tolist() == [5]

    def test_two_threads_may_wait_for_one_step(self, small: Small) -> None:
        arrival, found = small.launch(1), list[Any]()
        threads = [
            threading.Thread(target=lambda: found.append(arrival.wait()[0].tolist()))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert not arrival.is_done()  # returns immediately, although a thread waits
        small.write(1, 4)
        for thread in threads:
            thread.join()
        assert found == [[4], [4]]

    def test_step_without_samples_ends(self, small: Small) -> None:
        arrival = small.launch(0)
        assert not arrival.is_done()
        small.write(1)
        assert arrival.wait()[0].tolist() == []


class TestErrors:
    @pytest.mark.parametrize("call", ["cuLaunchKernel", "cuGraphLaunch"])
    def test_refused_driver_call_raises(self, small: Small, fake: FakeDriver, call: str) -> None:
        fake.fail(call, 1)
        with pytest.raises(RuntimeError, match=rf"{call}: unknown error \(1\)"):
            small.launch()
        assert "cuEventRecord" not in fake.counts()
        fake.fail(call, 0)
        arrival = small.launch()
        small.write(2, 1, 2, 3)
        assert arrival.wait()[0].tolist() == [1, 2, 3]

    def test_launched_step_without_an_event_ends_the_engine(
        self, small: Small, fake: FakeDriver
    ) -> None:
        fake.fail("cuEventRecord")
        with pytest.raises(EngineError, match="cannot be waited for: cuEventRecord: CUDA_ERROR"):
            small.launch()

    def test_launch_without_a_context_is_refused(self, small: Small, fake: FakeDriver) -> None:
        fake.fail("cuCtxSetCurrent", 3)
        raised: list[BaseException] = []

        def launch() -> None:
            with pytest.raises(RuntimeError, match="cuCtxSetCurrent") as error:
                small.launch()
            raised.append(error.value)

        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        assert raised and "cuLaunchKernel" not in fake.counts()

    def test_wait_raises_the_error_of_the_driver(self, small: Small, fake: FakeDriver) -> None:
        arrival = small.launch()
        fake.set_events(700)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"):
                arrival.wait()
        assert not arrival.is_done()

    def test_work_that_ends_without_tokens_raises(self, small: Small, fake: FakeDriver) -> None:
        arrival = small.launch()
        fake.set_events(0)
        with pytest.raises(RuntimeError, match="a step ended without its tokens"):
            arrival.wait()

    def test_wait_has_a_timeout(self, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_launcher, "TIMEOUT_S", 0.06)
        with pytest.raises(RuntimeError, match="a step has not ended within 0.06"):
            small.launch().wait()

    @pytest.mark.parametrize("name", ["cuGraphLaunch", "cuEventDestroy_v2"])
    def test_driver_without_a_needed_function_disables_the_launcher(
        self, small: Small, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        small.device.driver = compiled(name)
        assert make_launcher(small.device, small.state, small.inbox, small.ring) is None
        assert f"has no {name}" in caplog.text

    def test_missing_context_or_event_disables_the_launcher(
        self, small: Small, fake: FakeDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake.set_context(0)
        assert make_launcher(small.device, small.state, small.inbox, small.ring) is None
        assert "no CUDA context" in caplog.text
        fake.set_context(7)
        fake.fail("cuEventCreate", 2)
        assert make_launcher(small.device, small.state, small.inbox, small.ring) is None
        assert "cuEventCreate" in caplog.text

    def test_events_are_destroyed(self, small: Small, fake: FakeDriver) -> None:
        gc.collect()  # launchers of other tests
        before = fake.counts().get("cuEventDestroy", 0)
        small.launcher = None  # type: ignore[assignment]
        gc.collect()
        assert fake.counts()["cuEventDestroy"] - before == 8


class TestPreparing:
    """Preparing Triton's compiled kernel for launches by the driver."""

    def test_constants_are_not_passed_as_arguments(self) -> None:
        kernel = row_deltas._receive_kernel
        values: list[Any] = [torch.zeros(1)] * 7 + list(range(10))
        signature = dict.fromkeys(kernel.arg_names, "i32")
        signature |= dict.fromkeys(("token_stride", "COMPUTED", "BLOCK"), "constexpr")
        found = arguments_of(signature, tuple(values))
        assert list(found)[-2:] == ["table_stride", "num_rows"] and "token_stride" not in found
        assert found["num_words"] == 0 and found["slot_ptr"] == values[0].data_ptr()
        with pytest.raises(RuntimeError, match="one value of .'num_runs'"):
            arguments_of(signature | {"num_runs": "constexpr"}, tuple(values))

    @pytest.mark.parametrize("fault", ["global_scratch_size", "profile_scratch_size"])
    def test_kernel_with_scratch_memory_is_refused(self, fault: str) -> None:
        facts = SimpleNamespace(
            name="k", global_scratch_size=0, profile_scratch_size=0, num_ctas=1,
            launch_cooperative_grid=False, num_warps=4, warp_size=32, shared=16,
        )  # fmt: skip
        signature = dict.fromkeys(step_launcher.VARYING, "i32")
        compiled = SimpleNamespace(
            metadata=facts, function=5, src=SimpleNamespace(signature=signature),
            _init_handles=lambda: None,
        )  # fmt: skip
        kernel = SimpleNamespace(warmup=lambda *args, grid, **constants: compiled)
        found = step_launcher.prepare_kernel(kernel, (8, 1, 2, 3), {})
        assert (found.function, found.num_threads, found.shared_bytes) == (5, 128, 16)
        assert found.arguments == {"slot_ptr": 8, "num_words": 1, "num_deltas": 2, "num_runs": 3}
        setattr(facts, fault, 64)
        with pytest.raises(RuntimeError, match="scratch memory"):
            step_launcher.prepare_kernel(kernel, (8, 1, 2, 3), {})
