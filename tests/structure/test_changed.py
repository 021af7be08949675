"""The tests that a change selects (`tests/changed.py`)."""

from tests.changed import touched
from tests.structure.test_house import ROOT


def names(*changed: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in touched(changed)}


def test_module_selects_its_tests_and_their_importers() -> None:
    found = names("src/quire/engine/wire/core_choice.py")
    assert {"tests/engine/wire/test_core_choice.py", "tests/engine/client/test_fleet.py"} <= found
    assert "tests/render/test_lark.py" not in found and len(found) < 100


def test_helper_selects_tests_that_use_it_indirectly() -> None:
    found = names("tests/support/scheduler/fake_device.py")
    assert "tests/scheduler/test_preemption.py" in found, (
        "it imports pinning_core, which imports the helper"
    )
    assert not any(name.startswith("tests/render/") for name in found)


def test_other_files_select_tests_that_name_them() -> None:
    assert "tests/cli/test_migrating.py" in names("docs/use/vllm-flags.md")
    found = names("csrc/linear.cpp")
    assert found and all(name.startswith("tests/ops/") for name in found)


def test_shared_conftest_selects_all_tests() -> None:
    assert len(names("tests/conftest.py")) > 400
    assert not names() and not names("LICENSE.example")
