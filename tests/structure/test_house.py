"""The house rules, checked on the source: imports, lengths, and purity."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"

LAYERS = {
    "base": 0,
    "spec": 1,
    "kv": 2,
    "ops": 2,
    "scheduler": 3,
    "models": 3,
    "render": 3,
    "runner": 4,
    "engine": 5,
    "training": 5,
    "plugins": 6,
    "serve": 6,
    "tools": 7,
    "cli": 8,
    "vllm": 9,
}
# Third-party packages that a room may import; rooms that are not listed may import any.
PURE = {"numpy"}
ALLOWED: dict[str, set[str]] = {
    "base": {"numpy", "msgspec"},
    "spec": {"numpy", "msgspec"},
    "kv": PURE,
    "scheduler": PURE,
    "render": {"tokenizers", "jinja2", "llguidance"},
    "render/media": {"numpy", "PIL"},
    "render/tokens": {"tokenizers", "transformers"},
    "ops": {"numpy", "torch", "triton"},
    "models": {"numpy", "torch", "safetensors", "huggingface_hub", "transformers"},
    "runner": {"numpy", "torch"},
    "engine": {"llguidance", "numpy", "msgspec", "prometheus_client", "ray", "torch", "zmq"},
    "plugins": {"boto3", "botocore", "nixl", "redis"},
    "serve": {
        "fastapi", "h11", "msgspec", "numpy", "pydantic", "pydantic_core", "python_multipart",
        "opentelemetry", "ray", "rich", "starlette", "uvicorn",
    },
    "training": {"numpy", "safetensors", "torch"},
    "cli": {"rich", "yaml"},
    "vllm": {"msgspec", "prometheus_client", "torch", "yaml"},
}  # fmt: skip
IMPURE_MODULES = {"time", "random", "os", "io", "socket", "threading", "subprocess", "asyncio"}
IMPURE_CALLS = {"open", "print", "input", "hash"}


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, at any level."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "quire":
                yield from (f"quire.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str | None:
    """Return the room of a file; None for the package's own __init__."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", sources(PACKAGE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_room_imports_only_itself_and_lower_layers(path: Path) -> None:
    room = room_of(path)
    if room is None:
        return
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "quire" and rest and rest[0] in LAYERS:
            target = rest[0]
            lower = LAYERS[target] < LAYERS[room]
            assert target == room or lower, f"{room} must not import {name}"
        elif top in sys.stdlib_module_names or top == "quire":
            continue
        elif room in ALLOWED:
            folder = path.parent.relative_to(PACKAGE).as_posix()
            assert top in ALLOWED.get(folder, ALLOWED[room]), f"{room} must not import {name}"


@pytest.mark.parametrize("room", ["kv", "scheduler"])
def test_pure_rooms_use_no_clock_no_random_numbers_and_no_io(room: str) -> None:
    for path in sources(PACKAGE / room):
        bad = IMPURE_MODULES & {name.split(".")[0] for name in imports(path)}
        assert not bad, f"{path.name} imports {bad}"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in IMPURE_CALLS, f"{path.name} calls {node.func.id}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_random = node.value.id == "np" and node.attr == "random"
                assert not is_random, f"{path.name} uses np.random"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1


def all_code() -> list[Path]:
    return sources(PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "demo_model")


def test_files_and_functions_have_limited_length() -> None:
    long_files = [p.name for p in all_code() if len(p.read_text("utf-8").splitlines()) > 600]
    assert not long_files
    lengths = [item for path in all_code() for item in functions(path)]
    assert not [item for item in lengths if item[1] > 80]
    product = [n for path in sources(PACKAGE) for _, n in functions(path)]
    share = sum(n <= 30 for n in product) / len(product)
    assert share >= 0.9, f"{share:.0%} of the functions fit a screen"


def test_no_probing_and_no_pickle() -> None:
    """hasattr hides which interface is meant; pickle and eval run code of a file or a peer."""
    forbidden = {"hasattr", "eval", "exec"}
    for path in sources(PACKAGE):
        assert not {"pickle", "dill", "cloudpickle", "marshal"} & set(imports(path)), path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, f"{path}: {node.func.id}"


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages in sys.modules of a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{n.split('.')[0] for n in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_quire_loads_no_heavy_packages() -> None:
    heavy = {"torch", "numpy", "msgspec", "tokenizers", "jinja2", "rich", "safetensors", "PIL"}
    assert not heavy & loaded_by("import quire")


def test_text_side_and_scheduler_do_not_import_torch() -> None:
    assert "torch" not in loaded_by("import quire.scheduler.scheduler, quire.kv.sizing")
    assert "torch" not in loaded_by("import quire.render.renderer, quire.models.checkpoint.source")


def test_llm_imports_no_server_packages() -> None:
    loaded = loaded_by(
        "from quire import LLM\nimport quire.engine.executors.local, quire.runner.build"
    )
    assert "torch" in loaded
    assert not {"zmq", "fastapi", "uvicorn", "transformers", "rich", "PIL"} & loaded


def test_core_with_ranks_does_not_import_torch() -> None:
    assert "torch" not in loaded_by("import quire.engine.start.build, quire.engine.ranks.launch")


def test_async_llm_does_not_import_torch() -> None:
    loaded = loaded_by("from quire import AsyncLLM")
    assert not {"torch", "fastapi", "uvicorn", "transformers", "rich"} & loaded


def test_supervisor_imports_little_before_its_processes_start() -> None:
    code = "import quire.cli.main as cli\ncli._parse(['serve'])\nimport quire.serve.supervisor"
    assert not {"torch", "fastapi", "asyncio", "numpy", "PIL"} & loaded_by(code)


def test_each_public_name_resolves() -> None:
    import quire

    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name


MAX_PARAMETERS = 8
# Kernels take all pointers and strides; the C++ core's functions take all addresses and sizes.
WIDE = ("ops/kernels/", "ops/host/native_types.py")
# These have the parameters that callers know from other engines, or the operands of a kernel.
PUBLIC = {
    "serve/python/llm.py: chat", "serve/python/async_llm.py: generate", "vllm/llm.py: chat",
    "ops/moe.py: moe_experts",
}  # fmt: skip


def test_functions_have_few_parameters() -> None:
    found = []
    for path in sources(PACKAGE):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                each = node.args
                names = {arg.arg for arg in (*each.posonlyargs, *each.args, *each.kwonlyargs)}
                if len(names - {"self", "cls"}) > MAX_PARAMETERS and not name.startswith(WIDE):
                    found.append(f"{name}: {node.name}")
    assert set(found) <= PUBLIC
