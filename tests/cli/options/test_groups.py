"""Groups of settings in `options/groups.py`: each setting has a group and a short help text."""

import re

from quire.cli.options.groups import GROUPS, OTHER_VARIABLES, USUAL, VARIABLES
from quire.cli.settings import all_options
from tests.structure.test_house import PACKAGE, sources

OPTIONS = all_options()


def test_each_setting_is_in_exactly_one_group() -> None:
    names = [name for group in GROUPS for name in group.settings]
    assert sorted(names) == sorted(OPTIONS)
    assert len({group.name for group in GROUPS}) == len(GROUPS)
    assert set(USUAL) | set(VARIABLES) <= set(OPTIONS)


def test_help_is_one_short_phrase() -> None:
    for option in OPTIONS.values():
        text = re.sub(r"`[^`]*`", "code", option.help)
        assert len(text.split()) <= 25, option.name
        assert not text.endswith("."), option.name
        assert "(default" not in text, "the parser adds the default"


def test_listed_environment_variables_are_read() -> None:
    texts = " ".join(path.read_text("utf-8") for path in sources(PACKAGE))
    for name in OTHER_VARIABLES:
        assert texts.count(name) > 1 or name == "HF_TOKEN", name
