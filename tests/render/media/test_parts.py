"""Images and videos are taken out of messages in order, or rejected where not allowed."""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.render.media.parts import media_kinds, refuse_media, take_media

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "data:1"}}]},
    {"role": "assistant", "content": "b"},
    {"role": "tool", "content": [{"type": "video", "video": 2}, {"type": "image", "image": 3}]},
]


def test_media_sources_are_taken_out_in_order() -> None:
    messages, parts = take_media(MESSAGES)
    assert [(part.kind, part.source, part.where) for part in parts] == [
        ("image", "data:1", "messages[0].content[1]"),
        ("video", 2, "messages[2].content[0]"),
        ("image", 3, "messages[2].content[1]"),
    ]
    assert messages[0]["content"] == ["a", {"type": "image"}]
    assert messages[1] is MESSAGES[1]
    assert media_kinds(messages) == ["image", "video", "image"]
    assert media_kinds(MESSAGES) == []  # their sources were not taken out


def test_other_parts_are_unchanged() -> None:
    others = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "audio"}, 5]}]
    messages, parts = take_media(others)
    assert messages is others and not parts
    assert take_media([5, {"role": "user"}])[1] == []


@pytest.mark.parametrize(
    "prompt",
    [MESSAGES, take_media(MESSAGES)[0], {"prompt": "a", "multi_modal_data": {"image": 1}}],
)
def test_error_for_media_names_the_feature_that_rejects_them(prompt: object) -> None:
    with pytest.raises(RequestError, match="a session does not accept images or videos"):
        refuse_media(prompt, "a session")


@pytest.mark.parametrize("prompt", ["a", [1, 2], {"prompt": "a"}, MESSAGES[1:2]])
def test_prompts_without_media_are_accepted(prompt: object) -> None:
    refuse_media(prompt, "a session")
