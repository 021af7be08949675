"""Compare prepared launches with Triton's own, on a driver that launches nothing."""

import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

from quire.ops.kernels import launch
from quire.ops.kernels.launch import PREPARED, Integers, kernel
from tests.support.processes.forks import run_forked

KINDS = 30


@kernel(do_not_specialize=["length"])
def _scale(x_ptr, out_ptr, stride, length, factor, is_on, WIDTH: tl.constexpr, ADD: tl.constexpr):
    at = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at * stride, mask=at < length, other=0.0).to(tl.float32)
    if is_on:
        x = x * factor + ADD
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < length)


def argument_sets() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return arguments that differ in everything that Triton specialises for."""
    numbers = random.Random(7)
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    found = []
    for _ in range(KINDS):
        pointers = [memory[numbers.choice(list(memory))][numbers.choice((0, 1)) :] for _ in "xo"]
        if numbers.random() < 0.5:  # as a layer's weights
            pointers[0] = torch.nn.Parameter(pointers[0], requires_grad=False)
        strides = (1, 2, 16, 32, 1 << 31, 1 << 40, -(1 << 31))
        integers = [numbers.choice(strides), numbers.choice((1, 16, 9))]
        scalars = numbers.choice((0.5, 2.0)), numbers.choice((True, False))
        named = {"WIDTH": numbers.choice((16, 32)), "ADD": numbers.choice((1, 1.0, 2))}
        named["num_warps"] = numbers.choice((1, 2))
        found.append(((*pointers, *integers, *scalars), named))
    return found


def as_noted(launches: list[tuple[Any, ...]]) -> list[Any]:
    return [
        [each.data_ptr() if isinstance(each, torch.Tensor) else (type(each), each) for each in line]
        for line in launches
    ]


def compare() -> None:
    """Launch all sets twice, by Triton and prepared. The same machine code gets the same
    arguments, and no second prepared launch needs Triton."""
    from tests.support.kernels.compiled_launches import use

    made, sets, noted = use(), argument_sets(), []
    run, by_triton = type(_scale).__mro__[1].run, list[str]()

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        by_triton.append(os.environ[PREPARED])
        return run(self, *given, **named)

    type(_scale).__mro__[1].run = counted
    from quire.ops.kernels.launch import prepares

    for is_on in ("0", "1"):
        os.environ[PREPARED] = is_on
        prepares.cache_clear()
        for i, (args, named) in enumerate((*sets, *sets)):
            _scale[(i + 1, 2)](*args, **named)
        noted.append(as_noted(made.launches))
        made.launches.clear()
    assert noted[0] == noted[1], "a prepared launch differs from Triton's"
    assert by_triton.count("0") == 2 * KINDS and 10 < by_triton.count("1") <= KINDS
    functions = {line[4][1] for line in noted[0]}
    assert len(functions) > 10, "too few kernels differ"
    before = len(by_triton)
    from triton import knobs

    knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    _scale[(1,)](*sets[0][0], **sets[0][1])
    assert len(by_triton) == before + 1, "a profiler's hook needs Triton's launch"
    knobs.runtime.launch_enter_hook.calls.clear()
    _scale[lambda given: (3,)](*sets[0][0], **sets[0][1])
    args = sets[0][0]
    _scale[(1,)](*args[:5], is_on=args[5], **sets[0][1])
    assert len(by_triton) == before + 3, "Triton makes other forms of a launch"


def test_integers_of_one_specialisation_share_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a limited number of integers is remembered."""
    integers = Integers()
    groups = (1,), (2, 18), (16, 32), (-14,), (1 << 31, 1 << 40), (-(1 << 31) - 16,), (1 << 63,)
    found = [{integers[each] for each in group} for group in groups]
    assert all(len(each) == 1 for each in found) and len(set.union(*found)) == len(groups)
    known = dict(integers)
    monkeypatch.setattr(launch, "MAX_INTEGERS", len(known))
    assert integers[34] == integers[2] and integers == known


def compiled_by(launcher: type, **facts: Any) -> Any:
    """Return a stub of a compiled kernel whose launcher is of this class."""
    start: Any = object.__new__(launcher)
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0}
    options = {"launch_cooperative_grid": "grid", "launch_pdl": "pdl", "launch": "short"}
    vars(start).update(sizes | options | facts)
    return SimpleNamespace(run=start, function="function", packed_metadata="facts")


class OtherLauncher:
    """Launcher class that no version of Triton has."""


def test_only_triton_launchers_that_allocate_nothing_are_bypassed() -> None:
    plain = compiled_by(CudaLauncher)
    short = "short", ("function", "grid", "pdl", None, None, "facts", None, None, None)
    assert launch._start_of(plain) == short
    for whole in (
        compiled_by(CudaLauncher, global_scratch_size=1),
        compiled_by(CudaLauncher, profile_scratch_size=1),
        compiled_by(OtherLauncher),
    ):
        assert launch._start_of(whole) == (whole.run, ("function", "facts", None, None, None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the device's driver")
def test_prepared_launches_equal_tritons() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "from tests.kernels.test_prepared import compare; compare()"
    done = run_forked([sys.executable, "-c", code], timeout_s=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
