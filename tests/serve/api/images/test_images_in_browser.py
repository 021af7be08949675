"""Images on the page in a real browser: chosen, pasted, dropped, removed, sent, stored.

Needs playwright and a Chromium, as test_page_in_browser.py.
"""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.serve.context import ApiContext
from tests.serve.api.conftest import serving
from tests.serve.api.images.conftest import file_of, image_context, picture
from tests.support.serve.fake_client import FakeClient

sync_api = pytest.importorskip("playwright.sync_api")
TIMEOUT_MS = 30_000
WITH_IMAGES = "Add images or text files"  # title of the button if the model reads images
PNG = file_of(picture(56, 56))
LARGE = file_of(picture(20, 3000, 1))
AT_END = """() => {
  const thread = document.querySelector(".thread");
  const tray = document.querySelector(".composer .images");
  return !tray.hidden && thread.scrollTop > 0
    && thread.scrollHeight - thread.scrollTop - thread.clientHeight < 2;
}"""
GIVE = """([kind, name, type, content]) => {
  const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: data })
    : new DragEvent("drop", { ...options, dataTransfer: data });
  document.querySelector("#chat textarea").dispatchEvent(event);
}"""


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
def context(server_context: ApiContext) -> ApiContext:
    """A context that takes images, over the engine of the server that takes none."""
    assert isinstance(server_context.client, FakeClient)
    return image_context(server_context.client.engine)


def opened(browser: Any, url: str) -> Any:
    page = browser.new_context(reduced_motion="reduce").new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


def give(page: Any, kind: str, data: bytes, name: str = "a.png", type: str = "image/png") -> None:
    page.evaluate(GIVE, [kind, name, type, base64.b64encode(data).decode()])


def test_images_are_attached_removed_sent_and_stored(
    browser: Any, context: ApiContext, tmp_path: Path
) -> None:
    path = tmp_path / "chosen.png"
    path.write_bytes(PNG)
    client = context.client
    assert isinstance(client, FakeClient)
    errors: list[str] = []
    with serving(context) as url:
        page = opened(browser, url)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.wait_for_selector(f"button[title^='{WITH_IMAGES}']")
        waiting = page.locator(".composer .images [role=listitem]")
        page.get_by_label("Add attachments").set_input_files(str(path))
        waiting.nth(0).wait_for()
        give(page, "paste", LARGE)
        waiting.nth(1).wait_for()
        give(page, "drop", PNG, "b.png")
        waiting.nth(2).wait_for()
        give(page, "drop", b"<svg/>", "c.svg", "image/svg+xml")
        page.get_by_text("c.svg cannot be read as an image").wait_for()
        page.get_by_role("button", name="Remove image 1", exact=True).click()
        assert waiting.count() == 2
        page.get_by_label("Your message").fill("What is it?")
        page.keyboard.press("Enter")
        page.locator(".message.assistant .usage").wait_for()
        assert waiting.count() == 0
        shown = page.locator(".message.user img")
        sizes = shown.evaluate_all(
            "all => all.map((each) => [each.naturalWidth, each.src.slice(0, 15)])"
        )
        assert sizes == [[2048, "data:image/jpeg"], [56, "data:image/png;"]]
        assert len(client.requests[-1].media) == 2
        # An edited question shows its images.
        page.get_by_role("button", name="Edit", exact=True).click()
        assert page.locator(".editing img").count() == 2
        page.get_by_role("button", name="Cancel", exact=True).click()
        # The end of the conversation stays in view when the tray of images appears.
        page.set_viewport_size({"width": 800, "height": 360})
        give(page, "paste", PNG)
        page.wait_for_function(AT_END)
        page.get_by_role("button", name="Remove image 1", exact=True).click()
        # The images are stored, and sent again with the next question.
        page.reload()
        shown.nth(1).wait_for()
        page.wait_for_selector("#model option", state="attached")
        page.get_by_label("Your message").fill("And now?")
        page.keyboard.press("Enter")
        page.locator(".message.assistant .usage").nth(1).wait_for()
        assert len(client.requests[-1].media) == 2
        page.context.close()
    assert errors == []


@pytest.mark.slow
def test_oldest_images_are_dropped_if_browser_storage_is_full(
    browser: Any, context: ApiContext
) -> None:
    with serving(context) as url:
        page = opened(browser, url)
        page.wait_for_selector(f"button[title^='{WITH_IMAGES}']")
        give(page, "paste", PNG)
        page.locator(".composer .images img").wait_for()
        page.evaluate("localStorage.setItem('full', 'x'.repeat(5 * 1024 * 1024 - 3000))")
        page.get_by_label("Your message").fill("What is it?")
        page.keyboard.press("Enter")
        page.get_by_text("the oldest images are not saved").wait_for()
        page.locator(".message.assistant .usage").wait_for()
        page.evaluate("localStorage.removeItem('full')")
        page.reload()
        page.locator(".message.user", has_text="Image 1 is no longer stored").wait_for()
        page.context.close()


def test_page_refuses_images_for_a_text_model(browser: Any, server_url: str) -> None:
    page = opened(browser, server_url)
    page.wait_for_selector("[data-state=ready]")
    assert "does not read images" in str(
        page.get_by_role("button", name="Attach").get_attribute("title")
    )
    give(page, "paste", PNG)
    page.get_by_text("a.png is an image, and this model does not read images.").wait_for()
    give(page, "drop", PNG)
    assert page.locator(".composer .images img").count() == 0
    page.context.close()
