"""The C++ core and its type stubs."""

import ast
import inspect
import re
import sys
from types import SimpleNamespace

import pytest

from quire.ops.host import native_types
from quire.ops.host.native import INTERFACE_VERSION, core
from quire.ops.host.native_types import (
    Core,
    CoreGroup,
    CoreLauncher,
    CorePlan,
    CoreProgram,
    CoreStatePlan,
)

PROTOCOLS = {
    "AttentionPlan": CorePlan,
    "Program": CoreProgram,
    "SharedGroup": CoreGroup,
    "StatePlan": CoreStatePlan,
    "StepLauncher": CoreLauncher,
}


def in_stub(function: object) -> tuple[int, list[str]]:
    """Return the number of positional arguments, and the names of keyword-only ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]  # type: ignore[arg-type]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return len(parameters) - len(by_name), by_name


def in_core(function: object, is_method: bool) -> tuple[int, list[str]]:
    """Return the same for a compiled function, whose signature nanobind keeps as text."""
    ((signature, *_),) = function.__nb_signature__  # type: ignore[attr-defined]
    (parsed,) = ast.parse(re.sub(r"= \\\d+", "= None", signature) + ": ...").body  # defaults
    assert isinstance(parsed, ast.FunctionDef)
    arguments = parsed.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    return len(by_position) - is_method, [each.arg for each in arguments.kwonlyargs]


def functions(protocol: type) -> dict[str, object]:
    return {
        name: member
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and (name[0] != "_" or name == "__init__")
    }


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
def test_protocols_match_the_compiled_core() -> None:
    module = core()
    compiled = {name for name in dir(module) if not name.startswith("_")}
    declared = {name: each for name, each in functions(Core).items() if name != "__init__"}
    assert set(declared) == compiled
    for name, function in declared.items():
        found = getattr(module, name)
        is_class = isinstance(found, type)
        assert in_stub(function) == in_core(found.__init__ if is_class else found, is_class), name
        for method, member in functions(PROTOCOLS.get(name, native_types.CoreWeight)).items():
            if method != "__init__":
                assert in_stub(member) == in_core(getattr(found, method), True), f"{name}.{method}"


def test_core_for_another_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make serve` compiles no code for CPUs with fewer features than this machine's."""
    other = SimpleNamespace(version=lambda: INTERFACE_VERSION, linear_variants=list)
    monkeypatch.setitem(sys.modules, "quire._core", other)
    with pytest.warns(UserWarning, match="built for another CPU"):
        assert core.__wrapped__() is None
