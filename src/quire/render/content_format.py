"""Whether a chat template goes through the parts of a content or takes it as one text.

Found in the template's syntax tree: a `for` over the content of a message, under whatever name.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import nodes


def wants_parts(tree: "nodes.Template") -> bool:
    """Return whether the template has a loop over `message.content`, or over a variable set to
    it."""
    from jinja2 import nodes

    names = _content_names(tree)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def takes_strings(tree: "nodes.Template") -> bool:
    """Return whether the template asks `content is string`, so that it takes a text as well."""
    from jinja2 import nodes

    names = _content_names(tree)
    return any(
        test.name in ("string", "iterable", "sequence", "mapping") and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )


def _content_names(tree: "nodes.Template") -> set[str]:
    """Return variables and macro arguments that stand for a content."""
    from jinja2 import nodes

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return names


def _is_content(node: "nodes.Node", names: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
