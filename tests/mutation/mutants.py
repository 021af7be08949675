"""Mutants of a source file: each is one small mistake that a programmer could have made.

A shifted or inverted comparison, + for -, `and` for `or`, min for max, an off-by-one number, an
inverted condition, a missing statement. Assertions, annotations and texts are not changed:
assertions guard against our own bugs, and tests need not find those.
"""

import ast
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CHECKS = "check_invariants"  # functions of this name are assertions themselves

Edit = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True)
class Mutant:
    """One changed statement. function: where it stands, such as `Scheduler.add`; before, after: the
    line, or the head of the statement, as it was and as it is. place, index, edit: which statement
    of the file, which node of it, and what becomes of that."""

    path: Path
    function: str
    line: int
    before: str
    after: str
    place: int
    index: int
    edit: Edit

    @property
    def name(self) -> str:
        """What it is known by; line numbers may change."""
        return f"{self.path.as_posix()} {self.function}: {self.before} -> {self.after}"

    def tree(self, source: str) -> ast.Module:
        """The whole file with the mistake in it."""
        tree = ast.parse(source)
        _, statement = list(_statements(tree, ()))[self.place]
        _apply(statement, self.index, self.edit)
        return ast.fix_missing_locations(tree)


def mutants_of(path: Path, source: str) -> list[Mutant]:
    """All mutants of a file."""
    tree = ast.parse(source)
    found: dict[str, Mutant] = {}
    for place, (function, statement) in enumerate(_statements(tree, ())):
        for index, edit in _edits(statement):
            twin = copy.deepcopy(statement)
            _apply(twin, index, edit)
            heads = _head(statement), _head(twin)
            mutant = Mutant(path, function, statement.lineno, *heads, place, index, edit)
            found.setdefault(mutant.name, mutant)
    return list(found.values())


def sample(mutants: Iterable[Mutant], num: int, seed: int) -> list[Mutant]:
    """As many of them, chosen by a hash of what they say: the others change little when one of them
    comes or goes."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    chosen = sorted(mutants, key=rank)[:num]
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.line, mutant.name))


def _statements(
    node: ast.AST, names: tuple[str, ...], is_function: bool = False
) -> Iterator[tuple[str, ast.stmt]]:
    """Statements of functions that may be changed, with the outermost function they stand in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS | ast.ClassDef):
            if child.name != CHECKS:
                inner = names if is_function else (*names, child.name)
                yield from _statements(child, inner, is_function or isinstance(child, FUNCTIONS))
            continue
        if isinstance(child, ast.stmt):
            if isinstance(child, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
                continue
            if is_function:
                yield ".".join(names), child
        if not isinstance(child, ast.expr):
            yield from _statements(child, names, is_function)


def _edits(statement: ast.stmt) -> Iterator[tuple[int, Edit]]:
    """Changes of the statement's own expressions, by the number of the node; -1 is the whole."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_text:
        return
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    is_store = isinstance(statement, ast.Assign) and not any(
        isinstance(target, ast.Name) for target in statement.targets
    )
    if is_call or is_store or isinstance(statement, ast.AugAssign):
        yield -1, lambda node: ast.Pass()
    if isinstance(statement, ast.If | ast.While) and not isinstance(statement.test, ast.UnaryOp):
        yield -1, _turn_round
    for index, node in enumerate(_own_nodes(statement)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHERS:
            yield index, _other_comparison
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OTHERS:
            yield index, _other_operator
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield index, _without_not
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield index, _other_constant
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield index, _other_name


def _own_nodes(statement: ast.stmt) -> list[ast.AST]:
    """The nodes of a statement, without those of statements in it, annotations, texts and
    `strict=True`, which asserts something."""
    found: list[ast.AST] = [statement]
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "annotation", "cases"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                found += [n for n in ast.walk(part) if not isinstance(n, ast.expr_context)]
    left_out = {id(n) for node in found if _is_left_out(node) for n in ast.walk(node)}
    return [node for node in found if id(node) not in left_out]


def _is_left_out(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.keyword) and node.arg == "strict"
    )


def _apply(statement: ast.stmt, index: int, edit: Edit) -> None:
    """Change the statement in place."""
    if index >= 0:
        edit(_own_nodes(statement)[index])
        return
    made = edit(statement)
    if made is not statement:
        statement.__class__ = made.__class__  # type: ignore[assignment]


def _head(statement: ast.stmt) -> str:
    """Without the statements in it."""
    text = ast.unparse(statement)
    return text.partition("\n")[0] if isinstance(statement, ast.stmt) and "\n" in text else text


def _turn_round(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.If | ast.While)
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _other_comparison(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops[0] = OTHERS[type(node.ops[0])]()  # type: ignore[assignment]
    return node


def _other_operator(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp)
    node.op = OTHERS[type(node.op)]()  # type: ignore[assignment]
    return node


def _without_not(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.UnaryOp)
    node.op = ast.UAdd()  # of a bool, as good as nothing
    return node


def _other_constant(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    value = node.value
    node.value = not value if isinstance(value, bool) else value + 1  # type: ignore[operator]
    return node


def _other_name(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Name)
    node.id = NAMES[node.id]
    return node
