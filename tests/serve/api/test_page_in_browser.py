"""The page in a headless browser: chats, forks, the block map, played recordings and hostile text.
Also a dead engine, keyboard-only use, small screens and contrast.

Needs playwright and a Chromium: `pip install playwright && playwright install chromium`, or the
system's `chromium`; skipped if they are absent. Without `-m slow` only a short selection runs.
"""

import gzip
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.serve.context import ApiContext
from quire.tools.playback import write_playback
from quire.tools.replay import Outcome
from tests.serve.api.test_live import Viewer
from tests.support.engine.recorded_runs import Run
from tests.support.serve.fake_client import FakeClient

sync_api = pytest.importorskip("playwright.sync_api")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RIGHT_TO_LEFT = "\u202e\u2067reversed [link](javascript:alert(1))"
LONG = "x" * (1 << 20)
TIMEOUT_MS = 30_000  # for each action on the page
MIN_FPS = 10  # on a busy machine without a GPU; an idle machine reaches 60
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"


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
    """An open page. Afterwards, checks that it had no error and called only this server."""
    context = browser.new_context(reduced_motion="reduce", color_scheme="dark")
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT_MS)
    errors: list[str] = []
    sent: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: sent.append(request.url))
    opened.goto(server_url)
    opened.wait_for_selector("[data-state=ready]")
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    context.close()
    assert not errors
    assert all(url.startswith(server_url) for url in sent)


@pytest.fixture
def client(server_context: ApiContext) -> Iterator[FakeClient]:
    """The server's client, idle and without requests that other tests retained. Afterwards its
    engine runs again."""
    found = server_context.client
    assert isinstance(found, FakeClient)
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while found.num_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    found.let_go()
    yield found
    found.revive()
    found.release()


def say(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Any, num: int) -> None:
    """Wait until the page shows `num` complete responses."""
    page.locator(".message.assistant .usage").nth(num - 1).wait_for()
    page.wait_for_selector("[aria-busy=true]", state="detached")


def texts(page: Any, role: str) -> list[str]:
    found: list[str] = page.locator(f".message.{role} > .text").all_inner_texts()
    return found


def stream(chunks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the response of a stubbed server to a chat."""
    events = [{"choices": [{"delta": each, "finish_reason": None}]} for each in chunks]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return {"body": body, "content_type": "text/event-stream"}


# ---- chat ----------------------------------------------------------------------------------------


def test_chat_works_by_keyboard_and_survives_a_reload(page: Any) -> None:
    say(page, "Who are you?")
    answered(page, 1)
    [answer] = texts(page, "assistant")
    assert len(answer) > 10
    page.reload()
    assert texts(page, "assistant") == [answer]
    page.get_by_role("button", name="Edit").press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("Tell me a story.")
    page.get_by_role("button", name="Resend").press("Enter")
    answered(page, 1)
    assert texts(page, "user") == ["Tell me a story."]
    assert page.locator(".message.assistant").count() == 1
    page.get_by_role("button", name="Previous version").press("Enter")
    assert (texts(page, "user"), texts(page, "assistant")) == (["Who are you?"], [answer])
    assert page.evaluate("document.activeElement.textContent") == "›", "the focus is lost"


def test_chat_forks_share_blocks_and_become_columns(page: Any, client: FakeClient) -> None:
    page.get_by_label("Sent before the first message").fill(
        "You know every animal of the forest. " * 5
    )
    say(page, "Tell me a story about a fox.")
    answered(page, 1)
    client.hold()
    for _ in range(2):
        page.locator(".message.user").get_by_role("button", name="Fork").click()
    for _ in range(TIMEOUT_MS // 10):
        if client.num_unfinished == 2:
            break
        page.wait_for_timeout(10)
    client.hold(after_steps=6)
    assert page.locator(".column").count() == 3
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector("canvas.map:not([data-shared='0'])")
    description, num_moves = page.locator(".maps p"), 0
    while "shared by 2" not in description.inner_text():
        page.locator("canvas.map").press("ArrowRight")
        num_moves += 1
        assert num_moves < 300, "no block is described as shared"
    client.release()
    page.get_by_role("tab", name="Chat").click()
    answered(page, 3)
    assert texts(page, "user") == ["Tell me a story about a fox."], "the trunk is shown once"
    page.get_by_label("to all branches").check()
    say(page, "And then?")
    answered(page, 6)
    page.get_by_role("button", name="Close branch 2").click()
    assert page.locator(".column").count() == 2
    page.reload()
    assert page.locator(".column .message.assistant").count() == 4


def test_stop_keeps_the_partial_response(page: Any, client: FakeClient) -> None:
    client.hold(after_steps=12)
    say(page, "Tell me a story about a fox.")
    page.wait_for_selector("[aria-busy=true] > .text:not(:empty)")
    page.get_by_label("Your message").press("Escape")
    page.get_by_text("stopped").wait_for()
    assert len(texts(page, "assistant")[0]) > 0
    client.release()
    page.get_by_role("button", name="Regenerate").click()
    answered(page, 1)
    assert page.locator(".versions").inner_text().split() == ["‹", "2", "/", "2", "›"]


@pytest.mark.slow
def test_tools_tool_results_and_json_schema_are_sent(page: Any) -> None:
    sent: list[dict[str, Any]] = []
    calls = [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"place": "<b>Oslo'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]},
    ]
    answers = iter([stream(calls), stream([{"content": "It rains."}])])

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        route.fulfill(**next(answers))

    page.route("**/v1/chat/completions", answer)
    page.get_by_text("Tools", exact=True).click()
    box = page.get_by_label("Tools (JSON list)")
    box.fill("[{")
    say(page, "How is the weather?")
    page.get_by_text("Correct tools in the settings").wait_for()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    box.fill(json.dumps(tools))
    page.get_by_text("Structured output").click()
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.get_by_label("Your message").press("Enter")
    page.get_by_label("Result of weather").fill("rain")
    assert page.locator(".call pre").inner_text() == '{\n  "place": "<b>Oslo"\n}'
    page.get_by_role("button", name="Send result").click()
    page.locator(".text", has_text="It rains.").wait_for()
    first, second = sent
    assert first["tools"] == tools and first["tool_choice"] == "auto"
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    call, result = second["messages"][-2:]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"place": "<b>Oslo"}'
    assert result == {"role": "tool", "content": "rain", "tool_call_id": "c1"}


@pytest.mark.slow
def test_json_schema_constrains_the_response(page: Any) -> None:
    page.get_by_text("Structured output").click()
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
    page.get_by_label("JSON schema").fill(json.dumps(schema | {"additionalProperties": False}))
    say(page, "Is it good?")
    answered(page, 1)
    assert set(json.loads(texts(page, "assistant")[0])) == {"good"}


@pytest.mark.slow
def test_hostile_output_is_shown_as_plain_text(page: Any) -> None:
    pieces = [
        HOSTILE,
        RIGHT_TO_LEFT,
        *(LONG[at : at + (1 << 16)] for at in range(0, 1 << 20, 1 << 16)),
    ]
    answer = stream([{"reasoning_content": HOSTILE}, *({"content": each} for each in pieces)])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    say(page, HOSTILE)
    page.wait_for_selector(".message.assistant:not([aria-busy])")
    text = page.locator(".message.assistant > .text")
    assert text.evaluate("e => e.textContent") == "".join(pieces)
    assert text.locator("*").count() == page.locator(".reasoning .text *").count() == 0
    assert page.title() == "quire"
    page.set_viewport_size({"width": 360, "height": 700})
    width, room = page.evaluate(WIDTHS)
    assert width <= room
    assert text.evaluate("e => getComputedStyle(e).unicodeBidi") != "normal"


# ---- tokens --------------------------------------------------------------------------------------


def test_tokens_show_alternatives_and_fork_at_them(page: Any) -> None:
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.wait_for_selector(".token:nth-child(20)")
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    page.locator(".token").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    rows = page.locator(".others li")
    assert rows.count() >= 8
    other = rows.locator("button:not(.chosen)").first
    name = other.inner_text()
    with page.expect_request("**/fork") as forked:
        other.press("Enter")
    second = page.locator(".token-card").nth(1)
    second.locator(".token:nth-child(20)").wait_for()
    before = page.locator(".token-card").nth(0).locator(".token").all_inner_texts()
    after = second.locator(".token").all_inner_texts()
    assert after[:3] == before[:3] and after[3].strip() == name.strip("␣ ✓")
    assert second.locator(".token.given").count() == 4
    assert json.loads(forked.value.post_data)["token_ids"]
    second.get_by_text("shares blocks").wait_for()


def release_all_retained(client: FakeClient) -> None:
    for held in client.engine.client.core.held():
        client.engine.client.keep(held.id, 0.0)


@pytest.mark.slow
def test_fork_shares_retained_blocks_or_resends_the_tokens(page: Any, client: FakeClient) -> None:
    release_all_retained(client)
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_label("Prompt", exact=True).fill("A fox went to the river and the sea. " * 8)
    page.get_by_role("button", name="Generate", exact=True).click()
    page.wait_for_selector(".token:nth-child(3)")
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    client.hold(after_steps=3)
    page.locator(".token").nth(1).focus()
    page.locator(".others button:not(.chosen)").first.click()
    page.locator(".token-card").nth(1).locator(".token:nth-child(3)").wait_for()
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector("canvas.map:not([data-shared='0']):not([data-held='0'])")
    assert page.locator("[aria-label=Retained] tbody tr:visible").count() == 1
    client.release()
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    core, first = client.engine.client.core, client.requests[-2]
    release_all_retained(client)
    page.locator(".token-card").nth(0).locator(".token").nth(1).focus()
    with page.expect_request("**/v1/completions") as sent:
        page.locator(".others button:not(.chosen)").first.click()
    page.locator(".token-card").nth(2).locator(".token:nth-child(3)").wait_for()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    ids = json.loads(sent.value.post_data)["prompt"]
    with page.expect_response("**/v1/requests/*") as deleted:
        page.get_by_role("button", name="Close branch 3").click()
    assert deleted.value.ok and deleted.value.request.method == "DELETE"
    assert len(core.held()) == 0
    assert ids[:-2] == first.prompt_token_ids and client.requests[-1].prompt_token_ids == ids


# ---- the engine ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_map_shows_block_owners_and_page_survives_a_dead_engine(
    page: Any, client: FakeClient
) -> None:
    with page.expect_request("**/v1/engine/live?core=0&model=demo"):
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
    description, num_moves = page.locator(".maps p"), 0
    while "shared by 3" not in description.inner_text():
        map_.press("ArrowRight")
        num_moves += 1
        assert num_moves < 300, "no block is described as shared"
    map_.press("Enter")
    page.get_by_text("40 prompt tokens, at most 200 out").wait_for()
    page.keyboard.press("Escape")
    client.kill()
    page.get_by_text("updates resume").wait_for()
    page.locator("[data-state='engine away']").wait_for()
    client.revive()
    client.release()
    page.locator("[data-state=ready]").wait_for()
    page.wait_for_selector("#engine:not(.stale)")


def open_recording(page: Any, path: Path) -> None:
    page.get_by_role("tab", name="Engine").click()
    page.set_input_files("#engine input[type=file]", path)
    page.wait_for_selector(".player")


@pytest.mark.slow
def test_playback_shows_the_recorded_state_after_any_seek(page: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.everything()
    path = tmp_path / "frames.jsonl.gz"
    write_playback(tmp_path / "run", path, 0.0, Outcome())
    *frames, _ = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    viewer, used = Viewer(), []
    for frame in frames:
        viewer.take(frame)
        used.append(sum(state == 2 for state in viewer.known["groups"][0]["states"]))
    open_recording(page, path)
    slider, map_ = page.get_by_label("Position in the recording"), page.locator("canvas.map")
    num = len(frames)
    for at in (num // 2, 3, num - 2, 0):
        slider.fill(str(at))
        assert map_.get_attribute("data-used") == str(used[at])
    slider.focus()
    for at in range(1, 12):
        page.keyboard.press("ArrowRight")
        assert map_.get_attribute("data-used") == str(used[at])
    page.locator("[aria-label=Running] tbody button").first.press("Enter")
    page.locator(".story li", has_text="prompt tokens, at most").wait_for()
    page.keyboard.press("Escape")
    page.get_by_label("Speed").select_option("50")
    slider.press(" ")
    page.get_by_role("button", name="Play", exact=True).wait_for()
    assert slider.input_value() == str(num - 1)
    assert map_.get_attribute("data-used") == str(used[-1])
    page.get_by_role("button", name="Back to live").press("Enter")
    page.get_by_text("Live while this view is open").wait_for()
    page.set_input_files("#engine input[type=file]", {
        "name": "no.jsonl", "mimeType": "text/plain", "buffer": b"{}\nnothing",
    })  # fmt: skip
    page.get_by_text("no.jsonl has no frames").wait_for()


NUM_BLOCKS = 10_000
COUNT_FRAMES = """async () => {
  let num = 0, longest = 0, last = performance.now();
  const since = last;
  await new Promise(done => {
    const turn = now => {
      num++; longest = Math.max(longest, now - last); last = now;
      if (now - since < 3000) requestAnimationFrame(turn); else done();
    };
    requestAnimationFrame(turn);
  });
  return [1000 * num / (last - since), longest];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["all", "grouped"])
def test_map_of_ten_thousand_blocks_animates_smoothly(
    browser: Any, server_url: str, tmp_path: Path, order: str
) -> None:
    """Play ten frames a second, each with 500 changed blocks and 100 flashing ones."""
    path = tmp_path / "frames.jsonl"
    path.write_text("\n".join(json.dumps(frame) for frame in many_blocks(60)))
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(server_url)
    open_recording(page, path)
    assert page.get_by_label("Order of the blocks").input_value() == "grouped"
    page.get_by_text("10,000 of 10,000 blocks are free").wait_for()
    page.get_by_label("Order of the blocks").select_option(order)
    page.get_by_role("button", name="Play", exact=True).click()
    fps, longest_ms = page.evaluate(COUNT_FRAMES)
    at = float(page.locator(".controls output").inner_text().split()[0])
    context.close()
    print(f"{NUM_BLOCKS:,} blocks: {fps:.0f} frames a second, the longest {longest_ms:.0f} ms")
    assert fps >= MIN_FPS and at > 0.5


def many_blocks(num_frames: int) -> Iterator[dict[str, Any]]:
    unowned = {"owners": [-1] * NUM_BLOCKS, "sharers": [0] * NUM_BLOCKS, "states": [0] * NUM_BLOCKS}
    lists = {"running": [], "num_running": 0, "waiting": [], "num_waiting": 0, "pinned": []}
    host = {"num_blocks": 0, "num_swapped": 0, "num_cached": 0}
    yield {
        "type": "snapshot", "at_s": 0.0, "core": 0, "num_cores": 1, "reasons": {}, "block_size": 16,
        "num_rows": 64, "groups": [{"kind": "full", **unowned}], "steps": [], "host": host, **lists,
    }  # fmt: skip
    for i in range(num_frames):
        blocks = [(i * 500 + k * 19) % NUM_BLOCKS for k in range(500)]
        changed = {
            "group": 0, "blocks": blocks, "owners": [i % 64] * 500, "sharers": [1 + i % 3] * 500,
            "states": [2] * 500,
        }  # fmt: skip
        events = [["hit", 0, block] for block in blocks[:100]]
        yield {"type": "difference", "at_s": i / 10, "groups": [changed], "events": events}


# ---- accessibility -------------------------------------------------------------------------------

CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const pixel = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    if (element.closest(".unseen, .skip, option")) continue;
    const backs = [];
    for (let at = element; at; at = at.parentElement)
      backs.unshift(getComputedStyle(at).backgroundColor);
    const back = pixel(["white", ...backs]);
    const text = pixel(["white", ...backs, getComputedStyle(element).color]);
    const [a, b] = [light(back), light(text)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), element.outerHTML.slice(0, 90)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, select, canvas")]
  .filter(e => e.checkVisibility())
  .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
  .map(e => e.outerHTML.slice(0, 90))"""


@pytest.mark.slow
def test_contrast_labels_and_width_hold_in_all_themes_and_on_a_phone(page: Any) -> None:
    say(page, "Tell me a story about a fox.")
    answered(page, 1)
    page.locator(".message.user").get_by_role("button", name="Fork").click()
    answered(page, 2)
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.wait_for_selector(".token:nth-child(20)")
    page.locator(".token").nth(3).focus()
    for theme in ("dark", "light", "dark"):
        while page.locator("html").get_attribute("data-theme") != theme:
            page.locator("#theme").click()
        for name in ("Chat", "Tokens", "Engine"):
            page.get_by_role("tab", name=name).click()
            contrast, where = page.evaluate(CONTRASTS)[0]
            assert contrast >= 4.5, where
            assert page.evaluate(NAMELESS) == []
            page.set_viewport_size({"width": 360, "height": 700})
            width, room = page.evaluate(WIDTHS)
            assert width <= room, f"{name} is wider than a phone"
            page.set_viewport_size({"width": 1280, "height": 800})
    page.locator("#theme").click()
    page.reload()
    assert re.search("auto|light", page.locator("#theme").inner_text()), "the theme is saved"


@pytest.mark.slow
def test_all_controls_are_reachable_by_keyboard(page: Any) -> None:
    """Go from the first key to a fork at a token without a pointer."""
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#engine"
    page.keyboard.press("ArrowLeft")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Generate":
            break
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    page.wait_for_selector(".token:nth-child(9)")
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.at") == "0":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.at") == "1", "back at the token"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".token-card").nth(1).wait_for()
