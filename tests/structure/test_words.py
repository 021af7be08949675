"""Texts and code are plain English: the word test of `tests.structure.words`, and its own tests.

DONE lists the texts that have to pass; docstrings, comments and names have to pass everywhere. To
see the faults of one file: `python -m tests.structure.words PATH`.
"""

import ast
from pathlib import Path

import pytest

from tests.structure.banned import name_faults
from tests.structure.test_house import PACKAGE
from tests.structure.words import (
    ROOT,
    check_comments,
    check_docstrings,
    check_names,
    check_page,
    faults,
    html_texts,
    main,
    markdown_texts,
    num_words,
    own_lines,
    problems,
    python_texts,
    script_texts,
    sentences,
)

# Files, or folders with all files below, by the kind of text.
DONE: dict[str, tuple[str, ...]] = {
    "pages": (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        ".github/ISSUE_TEMPLATE/bug.md",
        "docs",
        "src",
        "tests/README.md",
        "benchmarks",
    ),
    "help": ("src",),
    "messages": ("src",),
    "web": ("web/src",),
}
# Allowed names: foreign interfaces, and names in stored files and in settings.
KEPT_NAMES = {
    "what": "std::exception::what of C++",
    "ask": "HookActions.ask, a documented interface",
    "is_guessing": "a field of plans in recordings",
    "guesses": "a key of the orders to benchmark drivers",
    "num_tried": "a key of the drivers' results",
    "told_ms": "a column of stored results",
}
FOLDERS = [
    f"src/quire/{path.name}" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
]
FOLDERS += ["benchmarks", "csrc", "demo_model", "tests", "web"]


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_docstrings_comments_and_names_are_plain(folder: str) -> None:
    kinds = ("docstrings", "comments", "names")
    found = [each for kind in kinds for each in problems(kind, [ROOT / folder])]
    found = [each for each in found if each.sentence not in KEPT_NAMES]
    assert not found, "\n".join(map(str, found[-20:]))


@pytest.mark.parametrize("kind", DONE)
def test_listed_texts_are_plain(kind: str) -> None:
    paths = [ROOT / name for name in DONE[kind]]
    assert not [path for path in paths if not path.exists()], "remove missing paths from the list"
    assert not [str(problem) for problem in problems(kind, paths)]


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("The scheduler computes it anew.", "'anew': write 'again'"),
        ("Whoever holds the key may read it.", "'Whoever': name the actor"),
        ("It runs beside the other server.", "'beside'"),
        ("The user is told the reason.", "'is told'"),
        ("Most of those are cached.", "'of those'"),
        ("The size of what came is known.", "'of what'"),
        ("A request goes on from another one.", "'goes on from'"),
        ("A small model guesses.", "'guesses': write 'draft tokens'"),
        ("Nobody waits.", "'Nobody'"),
        ("Newer rows give way.", "'give way'"),
        ("This engine takes no grammars.", "'takes no'"),
        ("Remove the field, or leave it out.", "'leave it out'"),
        ("The most requests that may wait.", "'The most requests'"),
        ("One token is sampled behind the prompt.", "'behind the prompt': write 'after'"),
        ("There is no model that fits.", "'no model that'"),
        ("What waits is preempted first.", "'What ...': begin with the actor"),
        ("Who decodes gets one token per step.", "'Who ...': begin with the actor"),
    ],
)
def test_banned_words_are_found(sentence: str, fault: str) -> None:
    assert [found for found in faults(sentence) if found.startswith(fault)]


@pytest.mark.parametrize(
    "sentence",
    [
        "The scheduler preempts the newest sequence.",
        "Several models are served side by side.",
        "Both run on one machine, besides the proxy.",
        "`beside` and `guess` are names in code.",
        "What is a block?",
        "What happens in one step.",
        "The server is behind a proxy.",
        "The requests that wait are resumed later.",
        "Run `quire serve`. Then go on a walk.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    assert not faults(sentence)


def test_stops_within_names_and_numbers_do_not_end_sentences() -> None:
    text = "Set max_model_len=4.5k, e.g. for chats. Then (in\nquire.base) run it! Done?"
    assert list(sentences(text)) == [
        "Set max_model_len=4.5k, e.g. for chats.",
        "Then (in quire.base) run it!",
        "Done?",
    ]


def test_long_sentences_are_found() -> None:
    assert not faults("word " * 25 + ".")
    assert faults("word " * 26 + ".") == ["26 words, at most 25"]
    assert num_words("a - b + `a long code span` = {}".replace("`a long code span`", "`x`")) == 4


def test_markdown_is_split_into_paragraphs_items_and_cells() -> None:
    text = """\
# A title
First line
second line.

- one item
  goes here
- [x] two
1. three

> A quote

| a | `x | y` b |
|---|---|
| c | d \\| e |

```bash
quire serve beside
```
![alt text](a.png) and [a *link*](b.md#c), <b>bold</b> [ref][r] <!-- anew -->

[r]: https://example.org
"""
    found = [" ".join(each.text.split()) for each in markdown_texts(text)]
    texts = [each for each in found if each.strip("-")]
    assert texts[:6] == [
        "A title", "First line second line.", "one item goes here", "two", "three", "A quote",
    ]  # fmt: skip
    assert texts[6] == "a"
    assert texts[7].endswith("` b")
    assert num_words(texts[7]) == 2
    assert texts[8:] == ["c", "d e", "alt text and a link, bold ref"]


def test_code_spans_count_as_one_word_and_are_shown_unchanged(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It runs `a. b beside <c> __d__` anew.\n", "utf-8")
    (problem,) = check_page(page)
    assert problem.line == 1
    assert problem.sentence.count("`") == 2
    assert num_words(problem.sentence) == 4
    assert str(problem).endswith("again': It runs `a. b beside <c> __d__` anew.")


def test_front_matter_and_generated_blocks_are_skipped(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "---\nname: anew\n---\nOurs.\n\n<!-- t: written by `make t` -->\nanew\n<!-- t: end -->\n"
        "Anew.\n",
        "utf-8",
    )
    assert [line for _, line in own_lines(page.read_text("utf-8"))] == ["Ours.", "", "Anew."]
    assert [problem.line for problem in check_page(page)] == [9]


def test_wide_lines_are_found_outside_of_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"| {'x' * 130} |\n\n[a]: {'x' * 130}\n\n{'x' * 121}\n", "utf-8")
    assert [(each.line, each.fault) for each in check_page(page)] == [
        (5, "121 columns, at most 120")
    ]


SOURCE = '''
"""The docstring of a module says it anew."""
WHY = {"a": "a note that everyone reads"}


def check(value: int) -> None:
    """The docstring of a function."""
    parser.add_argument("--x", help="the size of " "a block")
    if value:
        raise ConfigError(
            f"the value {value!r} is {'not a number' if value else 'out of range'}; " + HINT
        )
    log.warning("the queue of %s is full", name)
    size: int = setting(1, "how many requests may wait")
    open("a-path")
'''


def test_strings_of_python_are_read_as_help_or_messages() -> None:
    tree = ast.parse(SOURCE)
    assert [each.text for each in python_texts(tree, of_help=True)] == [
        "the size of a block", "how many requests may wait",
    ]  # fmt: skip
    assert [(each.line, each.text) for each in python_texts(tree, of_help=False)] == [
        (3, "a note that everyone reads"),
        (11, "the value {} is {}; {}"),
        (11, "not a number"),
        (11, "out of range"),
        (13, "the queue of %s is full"),
    ]


def test_strings_of_the_page_are_read_without_comments_and_code() -> None:
    script = """\
// it's a comment with 'a string'
const a = text.replace(/["'`]/g, ""), b = "one 'two' three"; /* "not this" */
show(`${count} rows, ${ok ? "all of them" : `no ${name} here`} run`, 'single');
"""
    assert [(each.line, each.text) for each in script_texts(script)] == [
        (2, "one 'two' three"),
        (3, "{} rows, {} run"),
        (3, "all of them"),
        (3, "no {} here"),
    ]
    page = '<p title="Go on">It runs &amp; waits</p>\n<script>"anew and anew"</script>'
    found = [(each.line, each.text) for each in html_texts(page) if each.text]
    assert found == [(1, "Go on"), (1, "It runs & waits")]


def test_command_prints_problems_and_exits_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("It waits.\n", "utf-8")
    bad.write_text("It waits.\n\nIt waits anew.\n", "utf-8")
    assert main([str(good)]) == 0
    assert not capsys.readouterr().out.strip()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{bad}:3: 'anew': write 'again': It waits anew.\n"
    assert main([str(tmp_path / "none.md")]) == 2


CODE = '''
class Queue:
    """Requests that wait.

    size: the number of requests.

        who asks whom = drawn, not read
    """

    def add(self, x: torch.Tensor) -> None:
        """Append a row of features, [hidden].

        Args:
            x: the features.
        """

    def send(self, x: "torch.Tensor | None", told: int) -> None:
        """Send features to the rank."""

    @property
    def length(self) -> int:
        """The number of requests."""

    def of(self) -> int:
        """Name of the queue."""


def pop() -> None:
    """Returns the oldest request."""
    most = 1  # nobody waits
    # One comment that
    # waits anew.
    at_most = 2  # short
    text = "# no comment, nobody"
'''


def test_docstrings_begin_with_verbs_and_name_shapes(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(CODE, "utf-8")
    found = [(each.fault.split(",")[0], each.sentence) for each in check_docstrings(source)]
    assert sorted(found) == [
        ("begin with an imperative verb", "Name of the queue."),
        ("begin with an imperative verb", "Returns the oldest request."),
        ("name the shapes of arrays", "Send features to the rank."),
    ]


def test_comments_are_read_without_code(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(CODE, "utf-8")
    assert [(each.line, each.fault[:8]) for each in check_comments(source)] == [
        (30, "'nobody'"),
        (31, "'anew': "),
    ]
    other = tmp_path / "source.cpp"
    other.write_text(
        'int told;  // nobody\n/* It waits\n * anew. */ f("// anew", \'"\');\n', "utf-8"
    )
    assert [each.line for each in check_comments(other)] == [1, 2]
    assert [each.sentence for each in check_names(other)] == ["told"]


def test_only_names_that_a_file_defines_are_checked(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(CODE, "utf-8")
    assert [each.sentence for each in check_names(source)] == ["most", "told"]
    assert name_faults("FEWEST_ROWS") == ["write 'min'"]
    assert name_faults("RowGuesser") == ["write 'draft' or 'drafter'"]
    assert name_faults("Parts")
    assert not name_faults("at_most")
    assert not name_faults("least_recently_used")
