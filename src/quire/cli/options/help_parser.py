"""Help in three sizes: `--help` shows the usual options, `--help GROUP` shows one group's options,
and `--help all` shows every option.

The topic of an argument group is the first word of its title: `cache settings` appears under
`--help cache`.
"""

import argparse
import copy
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from quire.cli.options.groups import GROUPS, USUAL, text_of

BRIEF, ALL = "", "all"
SETTINGS = " settings"  # end of the title of each group of settings
MODEL_WORDS = ("given_model", "given_models")  # destinations of MODEL without a flag
MAX_METAVAR = 15  # maximum characters of an option's value in `--help`
BUILT_IN = ("positional arguments", "options", "commands", "kinds")


class HelpParser(argparse.ArgumentParser):
    """An ArgumentParser whose `--help` takes a topic."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**(known | {"add_help": False, "allow_abbrev": False}))
        self._usual: frozenset[str] | None = None
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", const=BRIEF, metavar="GROUP",
            default=argparse.SUPPRESS, help="show the usual options, a group of options, or `all`",
        )  # fmt: skip

    def show_usually(self, *names: str) -> None:
        """Limit `--help` to these of the command's own options, and to its arguments."""
        self._usual = frozenset(names)

    def settings_group(self, name: str) -> argparse._ArgumentGroup:
        """Return the argument group for a group of settings; create it on the first call."""
        title = name + SETTINGS
        found = [group for group in self._action_groups if group.title == title]
        return found[0] if found else self.add_argument_group(title)

    def format_help(self, topic: str = BRIEF) -> str:
        """Return the help on a topic: BRIEF, ALL, or the name of a group or an option."""
        made = argparse.HelpFormatter(self.prog, max_help_position=30)
        if self.formatter_class is not argparse.HelpFormatter:
            made = self._get_formatter()
        if topic in (BRIEF, ALL):
            made.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
            made.add_text(self.description)
        for title, actions in self._sections(topic):
            made.start_section(title)
            made.add_arguments(actions)
            made.end_section()
        if topic == BRIEF and (topics := self._hidden_topics()):
            made.start_section("more help")
            made.add_arguments([_topic_line(name, text) for name, text in topics.items()])
            made.end_section()
        if topic in (BRIEF, ALL):
            made.add_text(self.epilog)
        return made.format_help()

    def print_help(self, file: Any = None, topic: str = BRIEF) -> None:
        """Print the help on a topic. Exit with a usage error if there is no such topic.

        The top-level parser also accepts a command's name, and has the topics of `quire serve`.
        """
        commands = self.commands()
        if topic in commands:
            commands[topic].print_help(file)
            return
        if topic in (BRIEF, ALL) or any(self._sections(topic)):
            self._print_message(self.format_help(topic), file or sys.stdout)
        if topic != BRIEF and "serve" in commands:
            commands["serve"].print_help(file, topic)
        elif topic not in (BRIEF, ALL) and not any(self._sections(topic)):
            self._refuse(topic)

    def commands(self) -> dict[str, "HelpParser"]:
        """Return the parsers of the commands, by name."""
        found = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return {name: parser for action in found for name, parser in action.choices.items()}

    def _sections(self, topic: str) -> Iterator[tuple[str | None, Sequence[argparse.Action]]]:
        """Yield the title and the options of each section to show."""
        usual_settings: list[argparse.Action] = []
        for group in sorted(self._action_groups, key=_rank):
            actions = [a for a in group._group_actions if self._is_shown(a, group, topic)]
            if topic == BRIEF and is_settings(group):
                usual_settings += actions
            elif actions:
                yield group.title, actions
        if usual_settings:
            usual_settings.sort(key=lambda action: USUAL.index(action.dest))
            yield "usual settings", [*map(_in_brief, usual_settings)]

    def _is_shown(
        self, action: argparse.Action, group: argparse._ArgumentGroup, topic: str
    ) -> bool:
        if action.help is argparse.SUPPRESS or topic == ALL:
            return action.help is not argparse.SUPPRESS
        if topic == BRIEF:
            return self._is_usual(action, group)
        return topic_of(group) == topic or f"--{topic}" in action.option_strings

    def _is_usual(self, action: argparse.Action, group: argparse._ArgumentGroup) -> bool:
        if is_settings(group):
            has_words = any(each.dest in MODEL_WORDS for each in self._actions)
            return action.dest in USUAL and not (action.dest == "model" and has_words)
        return self._usual is None or topic_of(group) is None or action.dest in self._usual

    def _hidden_topics(self) -> dict[str, str]:
        """Return the topics that show more than `--help`, each with its subject.

        Return none if `--help` shows everything."""
        found: dict[str, str] = {}
        is_complete = True
        for group in sorted(self._action_groups, key=_rank):
            is_whole = all(self._is_usual(action, group) for action in group._group_actions)
            is_complete = is_complete and is_whole
            if (topic := topic_of(group)) and (is_settings(group) or not is_whole):
                found.setdefault(topic, text_of(topic, has_settings=is_settings(group)))
        return {} if is_complete else found | {ALL: "every option"}

    def _refuse(self, topic: str) -> None:
        groups = map(topic_of, self._action_groups)
        topics = [*dict.fromkeys(name for name in groups if name), ALL]
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        close = difflib.get_close_matches(topic, [*topics, *flags], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        self.error(f"there is no help on {topic!r}{hint}; groups are: {', '.join(topics)}")


Commands: TypeAlias = "argparse._SubParsersAction[HelpParser]"


class _Help(argparse.Action):
    """Prints the help and ends the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, HelpParser)
        parser.print_help(topic=values)
        parser.exit()


def topic_of(group: argparse._ArgumentGroup) -> str | None:
    """Return the topic of a group; None for argparse's own groups."""
    title = group.title or ""
    return None if title in BUILT_IN else title.split()[0]


def is_settings(group: argparse._ArgumentGroup) -> bool:
    """Return whether a group holds settings."""
    return (group.title or "").endswith(SETTINGS)


def _rank(group: argparse._ArgumentGroup) -> int:
    """Return the position of a group in the help: settings come last, in the order of GROUPS."""
    names = [each.name for each in GROUPS]
    return names.index(topic_of(group) or "") if is_settings(group) else -1


def _in_brief(action: argparse.Action) -> argparse.Action:
    """Return an option for `--help`: its full name, and its text up to the first semicolon."""
    short = copy.copy(action)
    short.option_strings = [flag for flag in action.option_strings if flag.startswith("--")][:1]
    if len(str(action.metavar)) > MAX_METAVAR:
        short.metavar = "NAME"
    if action.nargs == "+":
        short.nargs, short.metavar = None, f"{action.metavar} ..."
    text, mark, rest = (action.help or "").partition(";")
    default = rest.partition("(default: ")[2]
    short.help = f"{text} (default: {default}" if mark and default else text
    return short


def _topic_line(name: str, text: str) -> argparse.Action:
    """Return a pseudo option, whose help line names a topic."""
    return argparse.Action([f"--help {name}"], "", nargs=0, help=text)
