"""Find out which forms of a message a chat template takes, by rendering short conversations.

    content      a text, a list of parts, or a list of one part   {"type": "text", "text": ...}
    arguments    of calls: an object, or its JSON text
    developer    a role of its own, or the role `system`

The template takes a form if its output contains the text. The text must not be within a list or an
object as Python or JSON writes it. Each test runs once, when a conversation needs its result,
because a template is untrusted code that may be slow.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.base.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import nodes

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json] | None], str]

ONE, TWO = "probeone", "probetwo"
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text"}},
            "required": ["text"],
        },
    },
}
CALL_ID = "probe0001"  # nine letters and digits, as Mistral's templates demand
NAME = {"name": "probe"}
RESULT: Json = {"role": "tool", "content": "ok", "tool_call_id": CALL_ID, **NAME}
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT, PART, PARTS = "text", "part", "parts"


def _part(text: str) -> Json:
    return {"type": "text", "text": text}


CONTENTS: dict[str, object] = {
    TEXT: f"{ONE} {TWO}",
    PART: [_part(f"{ONE} {TWO}")],
    PARTS: [_part(ONE), _part(TWO)],
}
# A part as Python and JSON write it, and an object's value as Python writes it.
LISTED = tuple(f"{quote}text{quote}: {quote}{ONE}" for quote in "'\"")
AS_PYTHON = f"'{ONE}'"
CALL_FORMS: tuple[tuple[object, str | None], ...] = (
    ({ONE: TWO}, ""),
    (f'{{"{ONE}": "{TWO}"}}', ""),
    ({ONE: TWO}, None),
    (f'{{"{ONE}": "{TWO}"}}', None),
)


class TemplateForms:
    """The forms of messages that one template takes.

    tree: the template's syntax tree.
    render: renders messages and tools; raises RequestError.
    """

    def __init__(self, tree: "nodes.Template", render: Render) -> None:
        self._tree = tree
        self._render = render
        self._taken: dict[tuple[str, str], bool] = {}
        self._later: dict[str, bool] = {}

    def takes_parts(self, role: str) -> bool:
        """Return whether a message's content may be a list of parts."""
        return self._takes(role, PARTS)

    def needs_part(self, role: str) -> bool:
        """Return whether a text must be wrapped in a list of one part."""
        return not self._takes(role, TEXT) and self._takes(role, PART)

    @property
    def needs_argument_text(self) -> bool:
        """Whether the arguments of calls must be JSON text instead of an object."""
        return isinstance(self._call_form[0], str)

    @property
    def call_content(self) -> str | None:
        """The content of a message that has only calls: an empty text or None."""
        return self._call_form[1]

    def developer_role(self, is_first: bool) -> str:
        """Return the role for a developer's message: `developer` or `system`.

        For the first message the result is `developer` if the template names and renders that role.
        Later in a conversation a template may drop one of the roles; then the other one is used."""
        if is_first:
            return "developer" if self._names_developer and self._renders("developer") else "system"
        roles = ("developer", "system") if self._names_developer else ("system", "developer")
        return next((role for role in roles if self._renders_later(role)), "system")

    @cached_property
    def _names_developer(self) -> bool:
        from jinja2 import nodes

        return any(each.value == "developer" for each in self._tree.find_all(nodes.Const))

    def _renders(self, role: str) -> bool:
        return any(self._takes(role, form) for form in CONTENTS)

    def _renders_later(self, role: str) -> bool:
        """Return whether the template renders a message of this role after an answer."""
        if role not in self._later:
            answer = self._user | {"role": "assistant"}
            messages = [self._user, answer, *self._conversation(role, CONTENTS[TEXT])]
            self._later[role] = self._shows(messages, ONE, TWO, but=())
        return self._later[role]

    @cached_property
    def _call_form(self) -> tuple[object, str | None]:
        """Return the first form of arguments and content with which the template renders a call."""
        for form in CALL_FORMS:
            conversation = [self._user, _calling(*form), RESULT]
            for messages in (conversation, conversation[:2]):
                if self._shows(messages, TWO, but=(AS_PYTHON, f'\\"{ONE}')):
                    return form
        return CALL_FORMS[0]

    def _takes(self, role: str, form: str) -> bool:
        role = role if role in ROLES else "user"  # unknown roles are treated like users
        if (role, form) not in self._taken:
            messages = self._conversation(role, CONTENTS[form])
            self._taken[role, form] = self._shows(messages, ONE, TWO, but=LISTED)
        return self._taken[role, form]

    def _conversation(self, role: str, content: object) -> list[Json]:
        message = {"role": role, "content": content}
        if role == "tool":
            arguments, empty = self._call_form
            none = "{}" if isinstance(arguments, str) else {}
            return [self._user, _calling(none, empty), message | {"tool_call_id": CALL_ID, **NAME}]
        if role == "assistant":
            return [self._user, message, self._user]
        return [message] if role == "user" else [message, self._user]

    @cached_property
    def _user(self) -> Json:
        """Return a user's message in a form that the template takes."""
        return {"role": "user", "content": [_part("hi")] if self.needs_part("user") else "hi"}

    def _shows(self, messages: list[Json], *words: str, but: tuple[str, ...]) -> bool:
        """Return whether the rendered text has all of `words` and none of `but`."""
        for tools in (None, [TOOL]):
            try:
                text = self._render(messages, tools)
            except RequestError:
                continue
            if all(word in text for word in words) and not any(word in text for word in but):
                return True
        return False


def _calling(arguments: object, content: str | None) -> Json:
    function = {"name": "probe", "arguments": arguments}
    call: Mapping[str, Any] = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
