"""Flags of other engines in `options/synonyms.py`: accepted, ignored with a note, or refused."""

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import config_from_flat
from quire.cli.config_file import resolve
from quire.cli.main import COMMANDS, _parse
from quire.cli.options.synonyms import COMMANDS as THEIR_COMMANDS
from quire.cli.options.synonyms import FLAGS, SYNONYMS
from quire.cli.options.translate import translate
from quire.cli.settings import all_options, vllm_spellings
from quire.serve.vllm_flags import FLAGS as VLLM_FLAGS
from tests.support.commands import run

OURS = {option.flag for option in all_options().values()}
CLIENTS = {"--url", "--temperature", "--max-tokens", "--repetition-penalty", "--system"}


def given(*words: str) -> dict[str, object]:
    """Return the settings that a command line gives."""
    arguments = _parse(words)
    resolve(arguments)
    return {name: each.value for name, each in arguments.settings.items()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-m demo -c 4096 -np 4", {"model": "demo", "max_model_len": 4096, "max_num_seqs": 4}),
        ("demo --ctx-size 4k --alias a", {"max_model_len": 4000, "served_model_name": ("a",)}),
        ("--model-path demo --context-length=512", {"model": "demo", "max_model_len": 512}),
        ("demo --tp 2 --mem-fraction-static 0.8", {"tensor_parallel_size": 2}),
        ("demo --dtype bf16 --hostname 0.0.0.0", {"dtype": "bf16", "host": "0.0.0.0"}),
        ("demo -ctk q8_0 -ctv q8_0", {"kv_cache_dtype": "int8"}),
        ("demo -ctk f16", {"kv_cache_dtype": "auto"}),
        ("demo -ngl 0", {"device": "cpu"}),
        ("demo --disable-radix-cache --is-embedding", {"enable_prefix_caching": False}),
        ("demo --is-embedding --no-webui", {"runner": "pooling", "page": False}),
        ("demo --ctx_size 64", {"max_model_len": 64}),
    ],
)
def test_accepted_flags_set_our_settings(line: str, expected: dict[str, object]) -> None:
    found = given("serve", *line.split())
    assert found.items() >= expected.items()


def test_values_meaning_the_default_set_nothing() -> None:
    assert given("serve", "demo", "-c", "0", "-np", "-1") == {"model": "demo"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve -t 8", "-t is not a flag of quire: set the environment variable QUIRE_NUM_THREADS"),
        ("serve --batch-size=2", "--batch-size is not a flag of quire: use --max-num-batched-tok"),
        ("serve -ctk q4_0", "-ctk q4_0 is not supported: use --kv-cache-dtype auto, int8 or fp8"),
        ("serve -ctk q8_0 -ctv f16", "-ctk and -ctv both set --kv-cache-dtype, to int8 and auto"),
        ("serve --alias", "--alias needs a value"),
        ("chat --alias x", "--alias stands for --served-model-name, which `quire chat` does not"),
        ("serve --endpoint http://x", "--endpoint stands for --url, which `quire serve` does not"),
    ],
)
def test_unsupported_flags_are_refused_with_advice(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    status, out, err = run(capsys, *line.split())
    assert (status, out) == (1, "")
    assert err.startswith("quire: ") and message in err


def test_ignored_flags_leave_a_note() -> None:
    words, notes = translate(["serve", "-ngl", "99", "--jinja", "x", "--", "-c"], (), "quire serve")
    assert words == ["serve", "x", "--", "-c"]
    assert [note.partition(":")[0] for note in notes] == ["-ngl is ignored", "--jinja is ignored"]
    assert _parse(["serve", "-fa", "on"]).notes[0].startswith("-fa is ignored: ")


def test_flags_of_the_command_itself_are_not_translated() -> None:
    assert translate(["-c", "1"], {"-c"}, "quire serve") == (["-c", "1"], [])
    assert given("serve", "demo", "-n", "2")["nnodes"] == 2


def test_client_commands_accept_synonyms() -> None:
    arguments = _parse(["chat", "--endpoint", "http://h:1", "--temp", "0.5", "--predict", "7"])
    assert (arguments.url, arguments.temperature, arguments.max_tokens) == ("http://h:1", 0.5, 7)


def test_synonyms_map_only_to_existing_flags() -> None:
    negative = {f"--no-{flag[2:]}" for flag in OURS}
    assert len(SYNONYMS) == sum(len(each.flags) for each in FLAGS), "each spelling is listed once"
    for flag, each in SYNONYMS.items():
        meaning = each.meaning
        replaced = [meaning.becomes, *meaning.values.values()]
        assert all(words[0] in OURS | negative | CLIENTS for words in replaced if words), flag
        kinds = bool(meaning.becomes or meaning.values), bool(meaning.advice), bool(meaning.ignored)
        assert any(kinds), flag
        assert not (meaning.advice + meaning.ignored).endswith("."), flag
        assert flag not in OURS
    theirs = {short for each in VLLM_FLAGS.values() for short in each.short}
    assert set(SYNONYMS) & (set(vllm_spellings()) | theirs) == {"-n"}


@pytest.mark.parametrize("word", THEIR_COMMANDS)
def test_commands_of_other_engines_get_advice(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert word not in COMMANDS
    status, out, err = run(capsys, word, "model")
    assert (status, out) == (2, "")
    assert f"there is no command {word!r}; {THEIR_COMMANDS[word]}" in err


def test_dtype_synonyms_are_accepted() -> None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"),
                        ("half", "float16"), ("f16", "float16")):  # fmt: skip
        assert config_from_flat(dtype=name).model.dtype == dtype
    with pytest.raises(ConfigError, match="dtype must be one of"):
        config_from_flat(dtype="int8")
