"""Convert structural tags, as vLLM and XGrammar define them, to grammar rules.

There are two notations: `{"structures": [{begin, schema, end}], "triggers": [...]}`, and a tree of
formats, `{"type": "structural_tag", "format": {"type": ...}}`. A format of free length, such as
any_text, needs to know its end. So each format is compiled together with the texts that may follow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.grammars.json_schema import check_size, parsed_json
from quire.render.grammars.lark import ANY_TEXT, Lark

MAX_TIMES = 1024

Node = Mapping[str, Any]
# Texts that may follow a format. Empty if the format comes last, None if another format follows.
Ends = Sequence[str] | None
# By kind of leaf format: a function that adds a rule for its field's value and returns the name.
Leaves = Mapping[str, Callable[[Any], str]]

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "an integer",
}
_LEAF_FIELDS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
_LEAF_KINDS: dict[str, tuple[type, ...]] = {
    "json_schema": (dict, bool), "regex": (str,), "grammar": (str,),
}  # fmt: skip


def tags_rule(lark: Lark, text: str, leaves: Leaves, field: str) -> str:
    """Add rules for a structural tag, given as JSON text; return the first rule's name.

    leaves: functions that add rules for json_schema, regex and grammar.
    Raises RequestError with `field`."""
    found = parsed_json(text, field)
    check_size(found, field)
    formats = _Formats(lark, leaves, field)
    if not isinstance(found, dict):
        raise formats.wrong("the structural tag", "must be an object")
    if "structures" in found:
        return lark.rule(formats.old(found))
    return lark.rule(formats.rule(formats.get(found, "format", dict, "the structural tag"), []))


class _Formats:
    """Compiles formats to expressions and rules."""

    def __init__(self, lark: Lark, leaves: Leaves, field: str) -> None:
        self._lark = lark
        self._leaves = leaves
        self._field = field

    def wrong(self, subject: str, rule: str) -> RequestError:
        return RequestError(f"{self._field}: {subject} {rule}.", self._field)

    def get(self, node: Node, name: str, kind: type, where: str, default: Any = None) -> Any:
        """Return a field, checked for its type. A field without a default must be there."""
        value = node.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(where, f"needs {name}, {_KINDS[kind]}")
        return value

    def texts(self, node: Node, name: str, where: str, default: Any = None) -> list[str]:
        """Return a field that is a list of texts, none of them empty."""
        values: list[Any] = self.get(node, name, list, where, default)
        if not all(isinstance(one, str) and one for one in values):
            raise self.wrong(where, f"needs {name}, a list of texts that are not empty")
        return values

    # ---- formats -----------------------------------------------------------------------------

    def old(self, node: Node) -> str:
        """Compile the notation with `structures` as triggered tags."""
        where = "the structural tag"
        tags = []
        for one in self.get(node, "structures", list, where):
            if not isinstance(one, dict):
                raise self.wrong(where, "needs structures, a list of objects")
            schema = {"type": "json_schema", "json_schema": one.get("schema")}
            tags.append({"type": "tag", "content": schema} | one)
        return self.triggered_tags({"tags": tags, "triggers": node.get("triggers")}, [])

    def rule(self, node: Node, ends: Ends) -> str:
        """Add a rule for a format followed by one of `ends`; return the rule's name."""
        return self._lark.rule(self.expression(node, ends))

    def expression(self, node: object, ends: Ends) -> str:
        """Return the expression for a format followed by one of `ends`."""
        if not isinstance(node, dict) or not isinstance(node.get("type"), str):
            raise self.wrong("each format", "must be an object with a type")
        match node["type"]:
            case "const_string":
                value = self.get(node, "value", str, "const_string")
                return self._followed(self._lark.literal(value), ends)
            case "json_schema" | "regex" | "grammar" as kind:
                return self._followed(self._leaf(node, kind), ends)
            case "any_text":
                return self._any_text(node, ends)
            case "sequence":
                return self._sequence(self._elements(node), ends)
            case "or":
                bodies = [self.rule(one, ends) for one in self._elements(node)]
                return f"({' | '.join(bodies)})"
            case "optional" | "star" | "plus" | "repeat" as kind:
                times = {"optional": "?", "star": "*", "plus": "+"}.get(kind) or self._times(node)
                content = self.rule(self.get(node, "content", dict, kind), None)
                return self._followed(content + times, ends)
            case "tag":
                return self._followed(self._tag(node, is_last=ends == []), ends)
            case "triggered_tags":
                return self.triggered_tags(node, ends)
            case "tags_with_separator":
                return self._followed(self._separated(node), ends)
            case kind:
                raise self.wrong(f"the format {kind[:40]!r}", "is not supported")

    def triggered_tags(self, node: Node, ends: Ends) -> str:
        """Return the expression for free text in which each trigger must begin one of its tags."""
        where = "triggered_tags"
        self._check_end(where, ends)
        triggers = self.texts(node, "triggers", where)
        tags = self.get(node, "tags", list, where)
        groups: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for tag in tags:
            begin = self._begin(tag)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise self.wrong(where, f"has no trigger for the tag that begins {begin[:40]!r}")
            groups[trigger].append(self._lark.rule(self._tag(tag, len(trigger))))
            whole.append(f"{self._lark.literal(trigger)} {groups[trigger][-1]}")
        free = self._free(node, where)
        heads = [
            self._lark.rule(f"{self._lark.until([trigger], free)} ({' | '.join(rests)})")
            for trigger, rests in groups.items() if rests
        ]  # fmt: skip
        if not heads:
            raise self.wrong(where, "needs tags, a list that is not empty")
        inner, first = f"({' | '.join(heads)})", f"({' | '.join(whole)})"
        tail = self._lark.until(ends, free) if ends else self._lark.rule(self._lark.terminal(free))
        at_least_one = self.get(node, "at_least_one", bool, where, False)
        if self.get(node, "stop_after_first", bool, where, False):
            only = self._followed(first if at_least_one else inner, ends)
            return only if at_least_one else f"({only} | {tail})"
        return f"{first} {inner}* {tail}" if at_least_one else f"{inner}* {tail}"

    # ---- their parts -------------------------------------------------------------------------

    def _followed(self, body: str, ends: Ends) -> str:
        after = " | ".join(self._lark.literal(end) for end in ends or ())
        return f"{body} ({after})" if after else body

    def _leaf(self, node: Node, kind: str) -> str:
        name = _LEAF_FIELDS[kind]
        value = node.get(name)
        if not isinstance(value, _LEAF_KINDS[kind]):
            raise self.wrong(kind, f"needs {name}, {_KINDS[_LEAF_KINDS[kind][0]]}")
        if node.get("style", "json") != "json":
            raise self.wrong(f"the style {str(node['style'])[:40]!r}", "is not supported")
        return self._leaves[kind](value)

    def _any_text(self, node: Node, ends: Ends) -> str:
        for name in ("max_tokens", "max_chars"):
            if node.get(name) is not None:
                raise self.wrong(f"any_text with {name}", "is not supported")
        self._check_end("any_text", ends)
        free = self._free(node, "any_text")
        return self._lark.until(ends, free) if ends else self._lark.terminal(free)

    def _check_end(self, where: str, ends: Ends) -> None:
        if ends is None:
            raise self.wrong(where, "must come last, or be the content of a tag with an end")

    def _free(self, node: Node, where: str) -> str:
        """Return the expression for text outside the tags, without the excluded texts.

        The text contains no added tokens, nor an excluded text spelled with ordinary tokens."""
        excluded = self.texts(node, "excludes", where, [])
        if not excluded:
            return ANY_TEXT
        inner = self._lark.terminal(" | ".join(map(self._lark.spelled, excluded)))
        return self._lark.terminal(f"{ANY_TEXT} & ~({ANY_TEXT} {inner} {ANY_TEXT})")

    def _sequence(self, elements: list[Any], ends: Ends) -> str:
        rules = [self.rule(one, None) for one in elements[:-1]]
        return " ".join([*rules, self.rule(elements[-1], ends)])

    def _elements(self, node: Node) -> list[Any]:
        kind = node["type"]
        elements: list[Any] = self.get(node, "elements", list, kind)
        if not elements:
            raise self.wrong(kind, "needs elements, a list that is not empty")
        return elements

    def _times(self, node: Node) -> str:
        minimum = self.get(node, "min", int, "repeat")
        maximum = self.get(node, "max", int, "repeat")
        if not 0 <= minimum <= MAX_TIMES or not (maximum == -1 or minimum <= maximum <= MAX_TIMES):
            raise self.wrong("repeat", f"needs 0 <= min <= max <= {MAX_TIMES}, or max -1")
        return f"{{{minimum},{'' if maximum == -1 else maximum}}}"

    def _begin(self, tag: Any) -> str:
        if not isinstance(tag, dict):
            raise self.wrong("each tag", "must be an object")
        begin: str = self.get(tag, "begin", str, "tag")
        return begin

    def _tag(self, tag: Any, num_read: int = 0, is_last: bool = False) -> str:
        """Return the expression for a tag without the first `num_read` characters of its begin."""
        begin = self._lark.literal(self._begin(tag)[num_read:])
        content = self.get(tag, "content", dict, "tag")
        ends = [tag["end"]] if isinstance(tag.get("end"), str) else self.texts(tag, "end", "tag")
        known: Ends = [end for end in ends if end]
        return f"{begin} {self.rule(content, known or ([] if is_last else None))}"

    def _separated(self, node: Node) -> str:
        where = "tags_with_separator"
        tags = [self._lark.rule(self._tag(one)) for one in self.get(node, "tags", list, where)]
        if not tags:
            raise self.wrong(where, "needs tags, a list that is not empty")
        one = f"({' | '.join(tags)})"
        separator = self._lark.literal(self.get(node, "separator", str, where))
        is_one = self.get(node, "stop_after_first", bool, where, False)
        body = one if is_one else f"{one} ({separator} {one})*"
        return body if self.get(node, "at_least_one", bool, where, False) else f"({body})?"
