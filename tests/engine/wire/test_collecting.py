"""Python's collector in the processes of a server, tried in a process of its own."""

import subprocess
import sys

CODE = """
import gc
from quire.engine.wire.child import YOUNG_OBJECTS, collecting_rarely

def collections():
    return sum(each["collections"] for each in gc.get_stats())

def step():
    '''As many outputs as a step of 4,096 rows has, all there at once, then freed.'''
    return len([[number] for number in range(20_000)])

before, frozen = gc.get_threshold(), gc.get_freeze_count()
with collecting_rarely():
    assert gc.get_freeze_count() > frozen + 1000
    began = collections()
    for _ in range(50):
        step()
    assert collections() == began, "steps were searched for cycles"
    cycles = [[] for _ in range(2 * YOUNG_OBJECTS)]
    for each in cycles:
        each.append(each)
    assert collections() > began, "cycles are never looked for"
assert gc.get_threshold() == before and gc.get_freeze_count() == 0
began = collections()
step()
assert collections() > began
print("all of it")
"""


def test_steps_are_not_searched_for_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "all of it\n", done.stderr
