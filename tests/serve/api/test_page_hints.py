"""The page's hints in a real browser: an unsent message, the model's defaults, moments without
data, rows out of view.

Covers `web/src`, as `test_page_in_browser.py` does, and is skipped under the same conditions.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.serve.api.test_page_in_browser import (
    answered,
    browser,
    client,
    many_blocks,
    open_recording,
    page,
    say,
    stream,
    sync_api,
    texts,
)
from tests.support.serve.fake_client import FakeClient

__all__ = ["browser", "client", "page"]  # fixtures
# Pixels of a chart that have ink, in a column at this share of its width.
INK = """(canvas, share) => {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(Math.floor(share * width), 0, 1, height);
  return data.filter((value, i) => i % 4 === 3 && value > 0).length;
}"""


def test_enter_during_generation_explains_why_nothing_is_sent(
    page: Any, client: FakeClient
) -> None:
    client.hold(after_steps=12)
    say(page, "Tell me a story about a fox.")
    page.wait_for_selector("[aria-busy=true] > .text:not(:empty)")
    num_requests = len(client.requests)
    say(page, "And then?")
    hint = page.get_by_text("An answer is still being generated")
    hint.wait_for()
    assert page.get_by_label("Your message").input_value() == "And then?"
    assert len(client.requests) == num_requests
    page.get_by_label("Your message").press("Escape")
    page.get_by_text("stopped").wait_for()
    assert hint.is_hidden()
    client.release()
    page.get_by_label("Your message").press("Enter")
    answered(page, 1)
    assert texts(page, "user")[-1] == "And then?"


def test_phone_settings_have_a_close_button(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.reload()
    opener = page.get_by_role("button", name="Settings", exact=True)
    opener.click()
    panel = page.locator("#chat-settings")
    assert panel.is_visible() and opener.get_attribute("aria-expanded") == "true"
    page.get_by_role("button", name="Close settings").click()
    assert panel.is_hidden() and opener.get_attribute("aria-expanded") == "false"
    assert page.evaluate("document.activeElement.textContent") == "Settings"


def test_a_parameter_is_sent_only_if_the_user_has_set_it(page: Any) -> None:
    """The fields show the model's own defaults."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(**stream([{"content": "Yes."}]))

    def with_defaults(route: Any) -> None:
        answer = route.fetch()
        card = answer.json()["data"][0] | {"default_sampling_params": {"temperature": 0.25}}
        route.fulfill(response=answer, json={"object": "list", "data": [card]})

    page.route("**/v1/models", with_defaults)
    page.route("**/v1/chat/completions", answer)
    page.reload()
    field = page.locator("#chat").get_by_label("Temperature")
    sync_api.expect(field).to_have_attribute("placeholder", "default 0.25")
    assert field.input_value() == ""
    say(page, "Is it good?")
    page.locator(".message.assistant:not([aria-busy])").wait_for()
    field.fill("0.5")
    say(page, "Is it good?")
    page.locator(".message.assistant:not([aria-busy])").nth(1).wait_for()
    assert "temperature" not in bodies[0] and bodies[1]["temperature"] == 0.5
    page.get_by_role("tab", name="Tokens").click()
    with page.expect_request("**/v1/completions") as written:
        page.get_by_role("button", name="Generate", exact=True).click()
    assert "temperature" not in json.loads(written.value.post_data)


def test_charts_draw_no_line_across_gaps(page: Any, tmp_path: Path) -> None:
    """A gap in time has no line, and a seek to the start clears the charts."""
    path = tmp_path / "frames.jsonl"
    path.write_text("\n".join(json.dumps(frame) for frame in busy_idle_busy()))
    open_recording(page, path)
    slider = page.get_by_label("Position in the recording")
    axes = 3
    for title in ("Throughput", "Time to first token", "Time per token"):
        chart = page.locator("figure", has_text=title).locator("canvas")
        slider.fill("15")
        assert chart.evaluate(INK, 0.5) == axes, title
        slider.fill("9")
        assert chart.evaluate(INK, 0.5) > axes, "a line is drawn where there is data"
    slider.fill("0")
    first = page.locator("figure", has_text="Time to first token")
    assert first.locator(".latest").inner_text() == ""
    assert "no data yet" in first.locator("canvas").get_attribute("aria-label")
    assert first.locator("canvas").evaluate(INK, 0.5) == 0


def busy_idle_busy() -> Iterator[dict[str, Any]]:
    """Yield nine frames of work, one a second, and nine more after half a minute."""
    yield next(many_blocks(0))
    for number in range(1, 19):
        at_s = number + (0 if number < 10 else 30)
        step = {"step": number, "at_s": at_s, "prefill_tokens": 4, "decode_tokens": 8}
        step |= {"sampled_tokens": 8, "duration_ms": 20.0}
        times = {"first_ms": 50.0, "next_ms": 20.0}
        yield {"type": "difference", "at_s": at_s, "steps": [step], **times}


def test_long_list_counts_the_rows_out_of_view(page: Any, tmp_path: Path) -> None:
    frame = next(many_blocks(0))
    row = {"index": 0, "num_prompt_tokens": 9, "num_computed_tokens": 9, "num_known_tokens": 12}
    row |= {"limit": 99, "num_cached_tokens": 0, "num_preemptions": 0, "num_blocks": 1}
    frame |= {"running": [{"id": f"r{i}", "number": i, **row} for i in range(37)]}
    path = tmp_path / "frames.jsonl"
    path.write_text(json.dumps(frame | {"num_running": 40}))
    open_recording(page, path)
    card = page.locator("section[aria-label=Running]")
    shown = card.locator("tbody tr").evaluate_all(
        "rows => { const box = rows[0].closest('.scroll').getBoundingClientRect();"
        " return rows.filter(row => row.getBoundingClientRect().bottom <= box.bottom + 1).length }"
    )
    assert 0 < shown < 37
    sync_api.expect(card.locator(".more")).to_have_text(f"{40 - shown} more below")
    card.locator(".scroll").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    sync_api.expect(card.locator(".more")).to_be_hidden()
    assert card.locator("tbody tr:visible").last.inner_text() == "and 3 more"
    assert page.locator("section[aria-label=Queue] .more").is_hidden()
