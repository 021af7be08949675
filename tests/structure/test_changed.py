"""Which tests a change touches (`tests/changed.py`)."""

from tests.changed import touched
from tests.structure.test_house import ROOT


def names(*changed: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in touched(changed)}


def test_a_module_touches_its_own_tests_and_those_that_import_it() -> None:
    found = names("src/quire/engine/wire/core_choice.py")
    assert {"tests/engine/wire/test_core_choice.py", "tests/engine/client/test_fleet.py"} <= found
    assert "tests/render/test_lark.py" not in found and len(found) < 100


def test_a_helper_touches_tests_that_use_it_through_another_one() -> None:
    found = names("tests/support/scheduler/fake_device.py")
    assert "tests/scheduler/test_preemption.py" in found, (
        "it imports pinning_core, which imports it"
    )
    assert not any(name.startswith("tests/render/") for name in found)


def test_other_files_touch_tests_that_name_them() -> None:
    assert "tests/cli/test_migrating.py" in names("docs/use/vllm-flags.md")
    found = names("csrc/linear.cpp")
    assert found and all(name.startswith("tests/ops/") for name in found)


def test_what_all_tests_share_touches_all() -> None:
    assert len(names("tests/conftest.py")) > 400
    assert not names() and not names("LICENSE.example")
