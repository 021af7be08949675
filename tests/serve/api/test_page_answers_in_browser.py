"""Responses and conversations of the page in a real browser: Markdown, attachments, files."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.api import test_page_in_browser
from tests.serve.api.test_page_in_browser import HOSTILE, TIMEOUT_MS, answered, say, stream

browser, page = test_page_in_browser.browser, test_page_in_browser.page  # its fixtures

MARKDOWN = r"""# Head

Some **bold** and `code`, a [link](https://example.org/a?b=1), a [bad one](javascript:alert(1)).

- [x] done
- one
  1. nested

| a | b |
|---|--:|
| 1 | 2 |

```python
x = 1  # <b>
```

Inline $e^{i\pi}$, five $5 and $6, and a formula:

$$\frac{1}{2}$$
"""


def show_answer(page: Any, *pieces: str) -> Any:
    """Stub a response in pieces, and return the element of its text."""
    answer = stream([{"content": piece} for piece in pieces])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    say(page, "Go on")
    page.wait_for_selector(".message.assistant:not([aria-busy])")
    return page.locator(".message.assistant > .text").last


def test_response_is_rendered_as_markdown(page: Any) -> None:
    """A response in single characters gives the same elements; a link asks before it opens."""
    text = show_answer(page, *MARKDOWN)
    text.locator("math").nth(1).wait_for()
    counts = {"h3": 1, "strong": 1, "p code": 1, "pre code": 1, "td": 2, "th": 2, "ol li": 1}
    for name, num in (counts | {"math": 2, "input:checked": 1, "a": 0, "b": 0}).items():
        assert text.locator(name).count() == num, name
    assert "[bad one](javascript:alert(1))" in text.inner_text()
    assert "five $5 and $6" in text.inner_text()
    text.get_by_role("link", name="link").click()
    dialog = page.get_by_role("dialog", name="Open a link")
    assert "https://example.org/a?b=1" in dialog.inner_text()
    opened = dialog.get_by_role("link", name="Open in a new tab")
    assert opened.get_attribute("rel") == "noopener noreferrer"
    page.keyboard.press("Escape")
    text.get_by_role("button", name="Copy the code").click()
    text.locator(".code-head button", has_text=re.compile("Copied|Not copied")).wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["**a_", "_a", "[", ">", "- > ", "1. ", "![[", "<a", "$\\def\\a{\\a\\a}\\a$", "\\(", "`", "|-"],
)
def test_hostile_markdown_renders_quickly_and_is_inert(page: Any, piece: str) -> None:
    source = piece * (11_000 // len(piece))
    since = time.monotonic()
    text = show_answer(page, source, HOSTILE)
    assert page.evaluate("1") == 1
    assert time.monotonic() - since < TIMEOUT_MS / 1000
    assert text.locator("script, img, iframe, [href], [src], [onerror]").count() == 0
    assert page.title() == "quire"


def test_attached_files_are_sent_as_text(page: Any) -> None:
    page.set_input_files("[aria-label='Add attachments']", [
        {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"a ``` b"},
        {"name": "no.bin", "mimeType": "", "buffer": b"\xff\xfe"},
        {"name": "cat.png", "mimeType": "image/png", "buffer": b"x"},
    ])  # fmt: skip
    page.get_by_text("no.bin is not text in UTF-8.").wait_for()
    assert "this model does not read images" in page.locator("#said").inner_text()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Read it")
    [message] = json.loads(sent.value.post_data)["messages"]
    assert message["content"] == "notes.md:\n````\na ``` b\n````\n\nRead it"
    answered(page, 1)
    assert page.locator(".message.user .files summary").inner_text() == "notes.md"


def test_conversations_are_searched_exported_and_imported(page: Any, tmp_path: Path) -> None:
    for text in ("Tell me of a fox", "Tell me of the sea"):
        page.get_by_role("button", name="New conversation").click()
        show_answer(page, "Once upon a time.")
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit your message").fill(text)
        page.get_by_role("button", name="Resend").click()
        page.wait_for_selector(".message.assistant:not([aria-busy])")
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("listitem")
    assert listed.count() == 2
    page.get_by_label("Search conversations").fill("FOX tell")
    assert listed.count() == 1
    page.get_by_label("Search conversations").fill("")
    page.get_by_text("Export and import").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="All as JSON").click()
    path = tmp_path / "all.json"
    saved.value.save_as(path)
    with page.expect_download() as written:
        page.get_by_role("button", name="This one as Markdown").click()
    written.value.save_as(tmp_path / "one.md")
    assert "**You**\n\nTell me of the sea" in (tmp_path / "one.md").read_text()
    page.evaluate("localStorage.clear()")
    page.reload()
    page.wait_for_selector("[data-state=ready]")
    assert listed.count() == 0
    page.get_by_text("Export and import").click()
    page.set_input_files("[aria-label='Import conversations']", path)
    listed.nth(1).wait_for()
    [one, *_] = json.loads(path.read_text())
    for number, changes in enumerate((
        {"title": 5}, {"system": None}, {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "", "note": {}}]},
        {"messages": [{"role": "user", "content": "", "files": [{"text": "a"}]}]},
        {"messages": [{"role": "user", "content": "", "images": ["https://example.org/x.png"]}]},
    )):  # fmt: skip
        bad = tmp_path / f"bad{number}.json"
        bad.write_text(json.dumps([one | changes]))
        page.set_input_files("[aria-label='Import conversations']", bad)
        page.get_by_text(f"{bad.name} holds no conversations").wait_for()


def test_each_response_explains_its_latency(page: Any) -> None:
    say(page, "Who are you?")
    answered(page, 1)
    page.get_by_role("button", name="Why this time?").click()
    page.locator(".story li", has_text="first token after").wait_for()
