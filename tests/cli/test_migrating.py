"""vLLM's flags: each is accepted, ignored or refused with a reason, and listed on a page."""

import argparse
import functools
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.secrets import MASK
from quire.cli.config_file import resolve
from quire.cli.main import _parse, with_dashes
from quire.cli.migrating import END, PAGES, groups_of, main, page
from quire.cli.options.help_parser import HelpParser
from quire.cli.settings import (
    FLAG,
    SERVER,
    Given,
    Option,
    add_settings,
    add_vllm_settings,
    all_options,
)
from quire.serve.vllm_compat import SECRETS, SPECULATION_FIELDS, VLLM_SETTINGS
from quire.serve.vllm_flags import FLAGS, GROUPS, VllmSetting
from tests.structure.test_house import ROOT

FOLDER = ROOT / "docs" / "use"
NAMES = ["vllm-flags-engine.md", "vllm-flags-other.md", "vllm-flags.md"]
BEGIN = "<!-- flags of Server; Scheduler: written by `make migrating` -->"
OPTIONS = all_options()
SAME = [name for name, each in FLAGS.items() if each.is_same]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def words_of(name: str, theirs: VllmSetting, value: object) -> list[str]:
    """Return the words with which a user sets this value."""
    if theirs.is_switch:
        return [flag(name) if value else flag(f"no_{name}")]
    return [flag(name), str(value)]


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of `quire serve` with all vLLM flags; `_parse` adds given ones only."""
    made = HelpParser()
    add_settings(made, *SERVER, model_first=True)
    spellings = [short for each in FLAGS.values() for short in each.short]
    add_vllm_settings(made, [*map(flag, FLAGS), *spellings])
    return made


def resolved(*words: str) -> tuple[argparse.Namespace, list[str]]:
    arguments = parser().parse_args(list(with_dashes(words)))
    return arguments, resolve(arguments)


def sample(option: Option) -> str:
    """Return a value that the option's parser accepts."""
    if option.choices:
        return option.choices[-1]
    return {int: "2k", float: "0.5", str: "x"}[option.kind]


def test_vllm_pages_are_up_to_date() -> None:
    paths = sorted(FOLDER.glob(PAGES))
    assert [path.name for path in paths] == NAMES
    texts = [path.read_text("utf-8") for path in paths]
    for text in texts:
        assert page(text) == text, "run `make migrating`"
    assert sorted(name for text in texts for name in groups_of(text)) == sorted(GROUPS)
    assert all(f"`{flag(name)}`" in "".join(texts) for name in FLAGS)


def test_page_gets_the_tables_of_its_groups(tmp_path: Path) -> None:
    copy = tmp_path / "vllm-flags-copy.md"
    copy.write_text(f"above\n{BEGIN}\nearlier flags\n{END}\nbelow\n")
    assert main([str(tmp_path)]) == 0
    found = copy.read_text("utf-8")
    assert found.startswith(f"above\n{BEGIN}\n") and found.endswith(f"{END}\nbelow\n")
    assert "earlier flags" not in found and "`--uds`" in found and "`--dtype`" not in found


def test_page_without_marks_or_with_unknown_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="the page lacks the lines"):
        page(f"nothing {END}")
    with pytest.raises(ConfigError, match="no group of flags 'Scheduling'; name one of: Server;"):
        page(f"{BEGIN.replace('Scheduler', 'Scheduling')}\n{END}")


def test_each_flag_is_in_one_group() -> None:
    assert sum(map(len, GROUPS.values())) == len(FLAGS) > 300
    assert set(SAME) <= set(OPTIONS), "flags with the same meaning are our options"
    assert not set(FLAGS) - set(SAME) & set(OPTIONS)
    assert {name for name, each in FLAGS.items() if each.becomes} == set(SPECULATION_FIELDS)
    for name, each in FLAGS.items():
        assert each.is_same or each.reason, name
        assert not each.reason.endswith("."), name


def test_flags_with_the_same_meaning_are_accepted() -> None:
    for name in SAME:
        option = OPTIONS[name]
        for spelling in (option.flag, "--" + name, *FLAGS[name].short):
            words = [spelling] if option.kind is bool else [spelling, sample(option)]
            arguments, notes = resolved(*words)
            expected = True if option.kind is bool else option.parse(sample(option))
            expected = (expected,) if option.several else expected
            assert arguments.settings == {name: Given(expected, FLAG)}, spelling
            is_exposed = option.exposed(expected)
            assert [note.partition(" ")[0] for note in notes] == [option.flag] * is_exposed


def test_other_flags_are_ignored_or_refused_with_the_reason() -> None:
    for name, theirs in VLLM_SETTINGS.items():
        check_other(name, theirs)


def check_other(name: str, theirs: VllmSetting) -> None:
    any_value = (True, False) if theirs.is_switch else ("anything",)
    harmless = any_value if theirs.harmless is None else theirs.harmless
    for value in harmless:
        words = words_of(name, theirs, value)
        for spelling in (words, [words[0].replace("-", "_").replace("__", "--", 1), *words[1:]]):
            arguments, notes = resolved(*spelling)
            assert notes == [f"{name} (flag) is ignored: {theirs.reason}."]
            assert arguments.settings == {}
    if theirs.harmless is None:
        return
    for value in any_value:
        if value not in harmless:
            with pytest.raises(ConfigError) as raised:
                resolved(*words_of(name, theirs, value))
            shown = MASK if name in SECRETS else value
            assert f"{name}={shown!r}" in str(raised.value)
            assert theirs.reason in str(raised.value)


def test_speculation_flags_set_the_speculative_config() -> None:
    arguments, notes = resolved("--spec-method", "ngram", "--spec_tokens", "3")
    expected = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert arguments.settings == {"speculative_config": Given(expected, FLAG)} and notes == []
    with pytest.raises(ConfigError, match="spec_model and speculative_config mean the same"):
        resolved("--spec-model", "m", "--speculative-config", "{}")
    with pytest.raises(ConfigError, match="spec_tokens must be a whole number, got 'many'"):
        resolved("--spec-tokens", "many")


def test_spellings_of_flags_are_accepted() -> None:
    """Only underscores in names change, including names of JSON fields. A letter may precede its
    value."""
    words = ["--structured_outputs_config.backend", "xgrammar", '--hf_overrides={"a_b": 1}']
    assert list(with_dashes(words))[::2] == [
        "--structured-outputs-config.backend", '--hf-overrides={"a_b": 1}',
    ]  # fmt: skip
    assert resolved(*words)[0].settings == {"hf_overrides": Given('{"a_b": 1}', FLAG)}
    for words in (["-O3"], ["-O", "3"], ["--optimization-level=3"]):
        assert "optimization_level" in resolve(_parse(["serve", *words]))[0]
    assert "cudagraph_capture_sizes" in resolved("--cudagraph-capture-sizes", "1", "2", "4")[1][0]


def test_misspelt_vllm_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["serve", "--swap-spaec", "4"])
    assert "did you mean --swap-space?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _parse(["doctor", "--enable-dbo-x"])


def test_vllm_names_of_values_are_accepted() -> None:
    from quire.base.settings.config import config_from_flat

    made = config_from_flat(model_impl="vllm", quantization="awq_marlin")
    assert (made.model.model_impl, made.model.quantization) == ("quire", None)
    assert config_from_flat(scheduling_policy="priority").scheduler is not None
