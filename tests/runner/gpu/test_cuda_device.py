"""Code that runs only on CUDA, on a fake: the calls, their order, and the state after errors."""

import functools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import EngineError, OutOfMemory
from quire.base.plan import RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.ops.attention_inputs import Scores
from quire.ops.blocks import streams
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.blocks.streams import CudaStreams, device_ids
from quire.ops.host.host_memory import to_device
from quire.ops.kernels import matmul, moe, moe_sort, row_deltas, step_inputs
from quire.ops.kernels.attention import attention, attention_plan, blocks
from quire.ops.kernels.launch import INTERPRETED
from quire.runner import memory_plan
from quire.runner.build import build_runner
from quire.runner.device import HostDevice
from quire.runner.gpu import graphs
from quire.runner.gpu.cuda_device import CudaDevice
from quire.runner.gpu.pieces import CutAtAttention, Pieces
from quire.runner.sampling import edits
from quire.runner.setup import profile
from quire.runner.setup.assemble import make_device
from tests.runner.gpu.test_kernel_ops import KINDS, devices, run, run_on_the_host  # noqa: F401 (a fixture)
from tests.runner.gpu.test_model_runner import SETTINGS
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.fake_cuda import FakeCuda
from tests.support.runner.late_device import LateDevice, stand_in

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
COMPUTE, SIDE = "stream 1", "stream 2"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    if torch.cuda.is_available():
        pytest.skip("a fake in the place of a GPU")
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


class TestDevice:
    def test_results_are_copied_after_the_work(self, cuda: FakeCuda) -> None:
        device, value = make_device(CUDA), torch.arange(3)

        def work() -> list[torch.Tensor]:
            cuda.log.append((cuda.current_stream().name, "works"))
            return [value]

        arrival = device.run(work)
        value.zero_()
        assert cuda.log == [
            (COMPUTE, "waits for", "default"),
            (COMPUTE, "works"),
            (SIDE, "waits for", COMPUTE),
            (SIDE, "keeps", (3,)),
        ]
        assert not arrival.is_done()
        assert arrival.wait()[0].tolist() == [0, 1, 2] and arrival.is_done()
        assert arrival.duration_s() == 2.0
        assert cuda.current_stream().name == "default"

    def test_wait_without_results_waits_for_the_end_of_the_work(self, cuda: FakeCuda) -> None:
        arrivals = [CudaDevice(CUDA).run(list) for _ in range(2)]
        assert arrivals[1].wait() == [] and arrivals[1].duration_s() == 2.0
        assert [arrival.is_done() for arrival in arrivals] == [False, True]

    def test_error_in_work_restores_stream_and_sync_mode(self, cuda: FakeCuda) -> None:
        device, modes = CudaDevice(CUDA, forbids_waiting=True), list[int]()
        cuda.sync_debug_mode = 1

        def work() -> list[torch.Tensor]:
            modes.append(cuda.sync_debug_mode)
            raise RuntimeError("called a synchronizing CUDA operation")

        with pytest.raises(RuntimeError, match="synchronizing"):
            device.run(work)
        assert modes == [2] and cuda.sync_debug_mode == 1
        assert cuda.current_stream().name == "default"

    def test_results_that_cannot_be_sent_end_the_engine(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unlike a failed launch, launched work cannot be repeated."""
        device, value = CudaDevice(CUDA), torch.ones(1)

        def fails(tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no pinned memory")

        monkeypatch.setattr(device, "_send", fails)
        with pytest.raises(EngineError, match="sent to the host: no pinned memory"):
            device.run(lambda: [value])
        assert cuda.current_stream().name == "default"

    def test_sent_values_are_copies(self, cuda: FakeCuda) -> None:
        values, words = np.arange(4), CudaDevice(CUDA).pinned(5)
        sent = [to_device(values, CUDA), device_ids(values.astype(np.int32), CUDA)]
        values[:] = 0
        assert [each.tolist() for each in sent] == [[0, 1, 2, 3]] * 2
        assert words.dtype == torch.int32 and words.tolist() == [0] * 5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
    def test_borrowed_tensor_shares_memory(self, cuda: FakeCuda, dtype: torch.dtype) -> None:
        tensor = torch.arange(24).to(dtype).view(2, 3, 4)[:, 1:]
        borrowed = CudaDevice(CUDA).borrow(tensor)
        assert torch.equal(borrowed, tensor) and borrowed.dtype == dtype
        assert borrowed.stride() == tensor.stride() and borrowed.data_ptr() == tensor.data_ptr()
        tensor.zero_()
        assert not borrowed.any()

    def test_cpu_devices_do_not_record(self) -> None:
        device, value = HostDevice(CPU), torch.ones(1)
        assert device.borrow(value) is value
        for refuses in (device.begin_capture, lambda: device.end_capture(None)):
            with pytest.raises(NotImplementedError):
                refuses()


FEW = [KINDS["greedy"][0], KINDS["logprobs"][0]]


@functools.cache
def expected_of_few() -> list[Any]:
    return run_on_the_host(FEW, rounds=1)


class TestGraphs:
    """The whole engine on a CudaDevice."""

    @pytest.fixture(autouse=True)
    def on_cuda(
        self,
        cuda: FakeCuda,
        devices: list[Any],  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        stand_in(monkeypatch, lambda device: CudaDevice(CPU))

    @pytest.mark.parametrize(
        "compilation", ["full", pytest.param("piecewise", marks=pytest.mark.slow)]
    )
    def test_each_recording_that_begins_ends(self, cuda: FakeCuda, compilation: str) -> None:
        assert run("triton", FEW, rounds=2, compilation=compilation) == 2 * expected_of_few()
        noted = [entry for entry in cuda.log if "record" in entry[1]]
        assert noted[::2] == [(COMPUTE, "begins to record")] * (len(noted) // 2)
        assert noted[1::2] == [(COMPUTE, "ends recording")] * (len(noted) // 2)
        assert (COMPUTE, "replays") in cuda.log

    @pytest.mark.parametrize(
        ("where", "compilation"),
        [
            ("step", "full"),
            pytest.param("end", "full", marks=pytest.mark.slow),
            ("end", "piecewise"),
        ],
    )
    def test_steps_that_cannot_be_recorded_are_launched(
        self,
        cuda: FakeCuda,
        where: str,
        compilation: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        carry_out = graphs.carry_out

        def broken(*args: Any):
            if cuda.capturing:
                raise RuntimeError("no such kernel")
            return carry_out(*args)

        cuda.fails_to_end = where == "end"
        if where == "step":
            monkeypatch.setattr(graphs, "carry_out", broken)
        with caplog.at_level(logging.WARNING, "quire"):
            found = run("triton", FEW, rounds=1, compilation=compilation)
        assert found == expected_of_few()
        failures = [each.message for each in caplog.records if "not be recorded" in each.message]
        assert len(failures) == len(set(failures)) > 1, "once for each kind of step"
        noted = [entry[1] for entry in cuda.log if "record" in entry[1]]
        assert (
            noted == ["begins to record", "ends recording"] * len(failures) and not cuda.capturing
        )
        assert (("allocator", "put right") in cuda.log) == (where == "end")
        assert (COMPUTE, "replays") not in cuda.log

    def test_full_device_is_logged_once(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(graphs, "record", full)
        with caplog.at_level(logging.WARNING, "quire"):
            found = run("triton", FEW, rounds=1)
        assert found == expected_of_few()
        assert sum("no memory for a graph" in each.message for each in caplog.records) == 1

    def test_memory_plan_includes_graphs(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Graphs take the memory of a step of the largest size, and a little for each size."""
        monkeypatch.setattr(memory_plan, "MIXED_TOKENS", (8,))
        path = str(checkpoint("llama"))
        config = config_from_flat(model=path, attention_backend="triton", **SETTINGS)
        built = build_runner(config, resolve_model(path, None))
        cuda.allocated, cuda.peak = 1000, 1700
        num_graphs = len(memory_plan.ladder(3)) + memory_plan.MAX_OTHER_GRAPHS
        expected = 700 + memory_plan.GRAPH_BYTES * num_graphs
        assert built.runner.graph_bytes(built.config) == expected
        adapted = config_from_flat(
            model=path, attention_backend="triton", enable_lora=True, **SETTINGS
        )
        more = memory_plan.GRAPH_BYTES * len(memory_plan.ladder(3))
        assert memory_plan.all_graphs_bytes(adapted, 700) == expected + more, (
            "graphs of steps without adapters count as well"
        )

        def make(config: Any, num_blocks: Any) -> Any:
            return built.runner, None

        free = cuda.free + (5 << 30)  # five GiB were taken since
        spec = built.spec
        plan = profile.plan_gpu_memory(built.config, spec, CUDA, 1 << 20, free, make)
        assert plan.workspace_bytes == 700
        assert plan.graph_bytes == expected
        assert ("host", "empties the cache") in cuda.log

        cuda.log.clear()
        assert profile.free_gpu_bytes(CUDA) == cuda.free
        assert cuda.log == [("host", "empties the cache")]

        def too_large(config: Any, num_blocks: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(OutOfMemory, match="Lower max_num_batched_tokens"):
            profile.plan_gpu_memory(built.config, spec, CUDA, 1 << 20, free, too_large)


def test_grown_tables_are_replaced_after_pending_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edits, "FIRST_CAPACITY", 4)
    device = LateDevice(CPU)
    table = edits.Edits(device, 3)
    start = [
        RowStart(row, np.zeros(1, np.int32), 0, 1, SamplingParams(allowed_token_ids=[7, 8, 9]), 0)
        for row in range(3)
    ]
    table.start(start[0])
    old, reading = table.table, device.run(lambda: [old.entries])
    table.start(start[1])
    assert table.generation == 1 and table.table is not old
    assert reading.is_done() and reading.wait()[0].tolist() == [7, 8, 9, 0]
    table.start(start[2])
    assert table.generation == 1
    device.run(list).wait()
    assert table.table.entries[:9].tolist() == [7, 8, 9] * 3


def test_attention_between_graphs_borrows_their_tensors() -> None:
    """The queries and the result stay at the addresses that were recorded."""
    device, found = LateDevice(CPU), Pieces()
    borrowed: list[torch.Tensor] = []
    device.borrow = lambda it: borrowed.append(it.clone()) or borrowed[-1]  # type: ignore
    used_tensors: list[torch.Tensor] = []
    backend: Any = SimpleNamespace(
        run=lambda layer, q, scale, out_TNH: used_tensors.extend((q, out_TNH)) or out_TNH
    )
    cutting = CutAtAttention(backend, device, found)
    cutting.begin()
    q_TNH = torch.ones(2, 1, 4)
    out_TNH = cutting.run(0, q_TNH, Scores(1.0))
    ends = [weakref.ref(q_TNH), weakref.ref(out_TNH)]
    del q_TNH, out_TNH
    cutting.end()
    assert [end() for end in ends] == [None, None]
    found.launches[1]()
    assert len(found.launches) == 3 and len(device.graphs) == 2
    assert [each is other for each, other in zip(used_tensors, borrowed, strict=True)] == [
        True,
        True,
    ]


VARYING = [
    (step_inputs._gather_kernel, {"max_tokens", "max_rows", "longest"}),
    (step_inputs._advance_kernel, {"max_rows"}),
    (row_deltas._receive_kernel, {"num_words", "num_deltas", "num_runs"}),
    (attention_plan._plan_kernel, {"num_rows", "merges_at"}),
    (attention._attention_kernel, {"table_stride"}),
    (blocks._move_kernel, {"num_moved"}),
    (matmul._matmul_kernel, {"num_tokens"}),
    (moe._route_kernel, {"num_tokens"}),
    (moe._up_kernel, {"max_tiles"}),
    (moe._down_kernel, {"max_tiles"}),
    (moe_sort._count_kernel, {"num_pairs"}),
    (moe_sort._sort_kernel, {"num_pairs", "num_chunks", "max_tiles"}),
]


@pytest.mark.parametrize("kernel, names", VARYING, ids=lambda x: getattr(x, "__name__", ""))
def test_varying_arguments_are_not_specialized(kernel: Any, names: set[str]) -> None:
    """Triton compiles again for an integer that is 1, and for a multiple of 16."""
    noted = kernel.kwargs if INTERPRETED else vars(kernel)
    assert names <= set(noted["do_not_specialize"])


class TestMoves:
    def test_blocks_are_copied_on_their_own_streams(self, cuda: FakeCuda) -> None:
        """Each stream waits for the previous one, and the loaded blocks equal the saved ones."""
        kv = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
        before, ids = kv.clone(), np.array([1, 4], np.int32)
        host = HostBlocks([kv], dim=1, streams=CudaStreams(CUDA), num_slots=2)
        host.swap_out(0, ids, ids)
        kv.zero_()
        out = [entry for entry in cuda.log if entry[1] == "waits for"]
        assert out == [("stream 1", "waits for", "default")]
        host.load(0, ids, ids)
        crossed = [(entry[0], entry[2]) for entry in cuda.log if entry[1] == "waits for"][1:]
        assert crossed == [("stream 2", "default"), ("default", "stream 2")]
        assert torch.equal(kv[:, ids], before[:, ids]) and not kv[:, 0].any()
        host.free_mirrors()
        kept = {entry[0] for entry in cuda.log if entry[1] == "keeps"}
        assert kept == {"stream 1", "stream 2"}

    def test_marks_are_done_after_all_earlier_work(self, cuda: FakeCuda) -> None:
        found = streams.streams_of(SimpleNamespace(is_cuda=True, device=CUDA))  # type: ignore
        assert isinstance(found, CudaStreams) and streams.streams_of(torch.ones(1)) is None
        first, failing = found.out.mark(), found.run_task(lambda: [][1])
        found.into.wait_for(first)
        last = found.into.mark()
        assert not first.is_done()
        last.wait()
        assert first.is_done() and last.is_done()
        with pytest.raises(IndexError):
            failing.wait()
        assert failing.is_done()
