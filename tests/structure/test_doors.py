"""Each request that enters the engine passes `admit`, as the source shows."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.structure.test_house import PACKAGE, sources, tree_of

ADMISSION = "engine/client/admission.py"
MAKERS = {"make", "make_pin", "make_pooling"}
# Files that construct a `Request`: the maker, retained requests, and synthetic loads.
CONSTRUCT = {
    "engine/client/requests.py",
    "scheduler/reuse/held.py",
    "tools/bench/calibrate.py",
    "tools/simulate/arrivals.py",
}
# Files that give a request to a client or a core; all but the first two repeat the check.
SUBMIT = {
    "engine/client/async_client.py",
    "serve/pipeline/answer.py",
    "serve/observers/observed_client.py",
    "serve/several/leased_client.py",
    "engine/client/fleet.py",
    "engine/client/client.py",
    "engine/start/prefix_file.py",
    "engine/wire/core_server.py",
    "serve/adapters.py",
    "serve/processes/core_processes.py",
    "serve/python/async_llm.py",
    "serve/python/llm.py",
    "tools/bench/calibrate.py",
    "tools/simulate/replica.py",
    "tools/simulate/run.py",
    "vllm/async_llm.py",
    "vllm/llm.py",
}
ENDS = ("client", "core", "super()")  # objects whose `generate` and `add` are called


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def nodes(path: Path) -> list[ast.Call | ast.Attribute]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call | ast.Attribute)]


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def is_called(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def num_makers(path: Path) -> int:
    """Count the uses of methods of `RequestMaker` that make a request."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in MAKERS
        and ast.unparse(node.value).endswith("requests")
        for node in nodes(path)
    )


def test_each_request_made_is_admitted() -> None:
    """Each file calls `admit` at least as often as it makes requests."""
    for path in sources(PACKAGE):
        if name_of(path) in ("engine/client/requests.py", "engine/start/prefix_file.py"):
            continue  # the core's own prefixes go through its guard, `Front.add`
        made = num_makers(path)
        admitted = sum(is_called(call, "admit") for call in calls(path))
        assert admitted >= made, f"{name_of(path)}: pass each request to admit ({ADMISSION})"


def test_requests_are_constructed_only_in_known_files() -> None:
    found = {
        name_of(path)
        for path in sources(PACKAGE)
        if any(is_called(call, "Request") for call in calls(path))
    }
    assert found == CONSTRUCT


def test_requests_are_submitted_only_in_known_files() -> None:
    found = {
        name_of(path)
        for path in sources(PACKAGE)
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("generate", "add")
        and ast.unparse(call.func.value).endswith(ENDS)
    }
    assert found == SUBMIT


def test_only_clients_and_admission_check_requests() -> None:
    found = {
        name_of(path)
        for path in sources(PACKAGE)
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "check"
        and ast.unparse(call.func.value).endswith(("client", "limits", "limits_of(self.ready)"))
    }
    clients = {f"engine/client/{name}.py" for name in ("async_client", "client", "fleet")}
    assert found == {
        ADMISSION, *clients, "engine/loop/front.py", "serve/processes/core_processes.py",
    }  # fmt: skip
