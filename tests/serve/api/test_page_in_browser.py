"""The page in a real browser, headless: chat to the end, the map while requests run, hostile text.

Needs playwright and a Chromium: `pip install playwright && playwright install chromium`, or a
`chromium` of the system's; skipped where they are not.
"""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from quire.serve.api.context import ApiContext
from tests.serve.api.fake_client import FakeClient

sync_api = pytest.importorskip("playwright.sync_api")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RIGHT_TO_LEFT = "\u202e\u2067reversed [link](javascript:alert(1))"
LONG = "x" * (1 << 20)
MOST_MS = 30_000  # that anything may take


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        options: dict[str, Any] = {"args": ["--no-sandbox"]}
        if found := shutil.which("chromium") or shutil.which("google-chrome"):
            options["executable_path"] = found
        try:
            launched = playwright.chromium.launch(**options)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, server_url: str) -> Iterator[Any]:
    """An open page. It reports no error, and asks nobody else for anything."""
    context = browser.new_context(reduced_motion="reduce", color_scheme="dark")
    opened = context.new_page()
    opened.set_default_timeout(MOST_MS)
    errors: list[str] = []
    asked: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(server_url)
    opened.wait_for_selector("[data-state=ready]")
    yield opened
    context.close()
    assert not errors
    assert all(url.startswith(server_url) for url in asked)


def say(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_a_chat_by_keyboard_alone_that_outlives_the_page(page: Any) -> None:
    say(page, "Who are you?")
    page.wait_for_selector(".usage:not(:empty)")
    answer = page.locator(".message.assistant .text").first.inner_text()
    assert len(answer) > 10
    page.reload()
    assert page.locator(".message.assistant .text").first.inner_text() == answer
    page.get_by_role("button", name="Edit").press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("Tell me a story.")
    page.get_by_role("button", name="Send anew").press("Enter")
    page.wait_for_selector(".usage:not(:empty)")
    assert page.locator(".message.user .text").all_inner_texts() == ["Tell me a story."]
    assert page.locator(".message.assistant").count() == 1


def test_what_a_model_writes_is_text(page: Any) -> None:
    texts = [
        HOSTILE,
        RIGHT_TO_LEFT,
        *(LONG[at : at + (1 << 16)] for at in range(0, 1 << 20, 1 << 16)),
    ]
    chunks = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=body, content_type="text/event-stream"
    ))  # fmt: skip
    say(page, HOSTILE)
    page.wait_for_selector(".message.assistant:not([aria-busy])")
    answer = page.locator(".message.assistant .text")
    assert answer.evaluate("e => e.textContent") == "".join(texts)
    assert answer.locator("*").count() == 0
    assert page.title() == "quire"
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate(f"{widths}[0] <= {widths}[1]")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.text')).unicodeBidi") != "normal"
    )


@pytest.fixture
def client(server_context: ApiContext) -> Iterator[FakeClient]:
    """The server's client; its engine runs again after."""
    found = server_context.client
    assert isinstance(found, FakeClient)
    yield found
    found.revive()
    found.release()


def test_the_map_shows_who_holds_blocks_and_the_dead_engine_comes_back(
    page: Any, client: FakeClient
) -> None:
    page.get_by_role("tab", name="Chat").press("ArrowLeft")
    map_ = page.locator("canvas.map")
    map_.wait_for()
    assert map_.get_attribute("data-used") == "0"
    client.hold(after_steps=30)
    body = {"prompt": list(range(5, 45)), "n": 3, "max_tokens": 200, "ignore_eos": True}
    page.evaluate(
        "b => { window.going = fetch('v1/completions', {method: 'POST', body: JSON.stringify(b),"
        " headers: {'Content-Type': 'application/json'}}); }",
        body,
    )
    page.wait_for_selector("canvas.map[data-shared='2']")
    assert int(map_.get_attribute("data-used")) > 4
    assert page.locator("[aria-label=Running] tbody tr:visible").count() == 3
    told, num_moves = page.locator(".maps p"), 0
    while "shared by 3" not in told.inner_text():
        map_.press("ArrowRight")
        num_moves += 1
        assert num_moves < 300, "no block is told as shared"
    map_.press("Enter")
    page.get_by_text("40 prompt tokens, at most 200 out").wait_for()
    page.keyboard.press("Escape")
    client.kill()
    page.get_by_text("goes on by itself").wait_for()
    page.locator("[data-state='engine away']").wait_for()
    client.revive()
    client.release()
    page.locator("[data-state=ready]").wait_for()
    page.wait_for_selector("#engine:not(.stale)")


def test_tokens_show_what_else_might_have_been(page: Any) -> None:
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_role("button", name="Write").click()
    page.wait_for_selector(".token:nth-child(20)")
    page.locator(".token").nth(3).focus()
    rows = page.locator(".others li")
    assert rows.count() >= 8
    before = page.locator(".token").nth(2).inner_text()
    other = rows.locator("button:not(.chosen)").first
    name = other.inner_text()
    other.click()
    page.wait_for_selector(".token:nth-child(20)")
    assert page.locator(".token").nth(2).inner_text() == before
    assert page.locator(".token").nth(3).inner_text().strip() == name.strip("␣")
