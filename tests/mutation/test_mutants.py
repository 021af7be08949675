"""The mutants of a piece of code: all are found and differ as they say. A sample stays the same
when mutants are added."""

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from quire.kv.digest import extend_by_one
from quire.kv.state_table import StateTable
from tests.mutation.mutants import mutants_of, sample
from tests.mutation.run import KILLED, ROOT, SURVIVED, in_child, put_in_place

SOURCE = '''
LIMIT = 8  # not in a function, so it stays

class Box:
    def take(self, num: int = 1) -> bool:
        """Of 3 and 4 in a text, nothing becomes 5."""
        assert num < 9
        if num <= LIMIT and not self.full:
            self.left -= num
        for place in range(min(num, 2)):
            self.put(f"{place + 1}", strict=True)
        return num == 0

    def check_invariants(self) -> None:
        if self.left < 0:
            raise ValueError(self.left + 1)
'''
WANTED = {
    ("if num <= LIMIT and (not self.full):", "if not (num <= LIMIT and (not self.full)):"),
    ("if num <= LIMIT and (not self.full):", "if num < LIMIT and (not self.full):"),
    ("if num <= LIMIT and (not self.full):", "if num <= LIMIT or not self.full:"),
    ("if num <= LIMIT and (not self.full):", "if num <= LIMIT and +self.full:"),
    ("self.left -= num", "self.left += num"),
    ("self.left -= num", "pass"),
    ("for place in range(min(num, 2)):", "for place in range(max(num, 2)):"),
    ("for place in range(min(num, 2)):", "for place in range(min(num, 3)):"),
    ("self.put(f'{place + 1}', strict=True)", "pass"),
    ("return num == 0", "return num != 0"),
    ("return num == 0", "return num == 1"),
}


def test_all_mutants_of_a_piece_of_code() -> None:
    found = mutants_of(Path("box.py"), SOURCE)
    assert {(mutant.before, mutant.after) for mutant in found} == WANTED
    assert {mutant.function for mutant in found} == {"Box.take"}
    for mutant in found:
        lines = ast.unparse(mutant.tree(SOURCE)).splitlines()
        assert mutant.after in [line.strip() for line in lines]
        changed = set(lines) ^ set(ast.unparse(ast.parse(SOURCE)).splitlines())
        assert {line.strip() for line in changed} == {mutant.before, mutant.after}


def test_a_sample_changes_little_when_the_code_does() -> None:
    mutants = mutants_of(Path("box.py"), SOURCE)
    more = mutants_of(Path("more.py"), SOURCE.replace("take", "give"))
    first = {mutant.name for mutant in sample(mutants, 5, seed=0)}
    assert first == {mutant.name for mutant in sample(mutants[::-1], 5, seed=0)}
    assert first != {mutant.name for mutant in sample(mutants, 5, seed=1)}
    both = {mutant.name for mutant in sample([*more, *mutants], 5, seed=0)}
    assert len(both) == 5 and all("more.py" in name for name in both - first)


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("src/quire/kv/digest.py", extend_by_one),
        ("src/quire/kv/state_table.py", StateTable.__init__),  # super().__init__ is left out
    ],
)
def test_a_mutant_takes_the_place_of_its_function(path: str, function: Any) -> None:
    """Also when the collection of tests froze all objects, and with a proxy of a dead object."""
    found = mutants_of(Path(path), (ROOT / path).read_text())
    mutant = next(each for each in found if each.function == function.__qualname__)
    dead = weakref.proxy(lambda: None)

    def work(pipe: int) -> int:
        before = function.__code__
        gc.freeze()
        put_in_place(mutant)
        assert type(dead) is weakref.CallableProxyType
        return KILLED if function.__code__ != before else SURVIVED

    assert in_child(work, 60) == (KILLED, "")
