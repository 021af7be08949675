"""Running a state machine of hypothesis as a test, the same examples each time."""

import pytest
from hypothesis import HealthCheck, Phase, settings

# How many random programs: some in `make test`, many in `make test-long`. FEW is for machines that
# add a feature to another machine.
FEW_OR_MANY = pytest.mark.parametrize(
    "max_examples", [10, pytest.param(300, marks=pytest.mark.slow)]
)
FEW = pytest.mark.parametrize("max_examples", [5, pytest.param(300, marks=pytest.mark.slow)])


def run_machine(machine: type, max_examples: int) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=50,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
