"""Python's garbage collector in the processes of a server, tested in a subprocess."""

import subprocess
import sys

CODE = """
import gc
from quire.engine.wire.child import YOUNG_OBJECTS, collecting_rarely

def collections():
    return sum(each["collections"] for each in gc.get_stats())

def step():
    '''Allocate as many outputs as a step of 4,096 rows has, then free them.'''
    return len([[number] for number in range(20_000)])

before, frozen = gc.get_threshold(), gc.get_freeze_count()
with collecting_rarely():
    assert gc.get_freeze_count() > frozen + 1000
    began = collections()
    for _ in range(50):
        step()
    assert collections() == began, "the collector ran during steps"
    cycles = [[] for _ in range(2 * YOUNG_OBJECTS)]
    for each in cycles:
        each.append(each)
    assert collections() > began, "the collector never runs"
assert gc.get_threshold() == before and gc.get_freeze_count() == 0
began = collections()
step()
assert collections() > began
print("all of it")
"""


def test_steps_do_not_trigger_garbage_collection() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "all of it\n", done.stderr
