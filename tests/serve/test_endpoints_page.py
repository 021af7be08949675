"""The page of endpoints by API shows the routes that the server has."""

import pytest

from tests.serve.endpoints_page import PAGE, ROUTES, documented, make_app, page, refusal, route_of


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make fields`"


@pytest.mark.parametrize("api", ROUTES)
def test_every_route_is_served_or_has_a_reason(api: str) -> None:
    app = make_app()
    listed = list(documented(api))
    assert len({(each.method, each.path) for each in listed}) == len(listed)
    for each in listed:
        assert (route_of(app, each) is None) == bool(each.instead), f"{each.method} {each.path}"


def test_page_shows_the_servers_own_refusal() -> None:
    app = make_app()
    [audio] = [each for each in documented("OpenAI") if each.path == "/v1/audio/speech"]
    assert "transcribe or speak with another server" in refusal(app, audio)
    [chats, *_] = documented("OpenAI")
    assert not refusal(app, chats)
