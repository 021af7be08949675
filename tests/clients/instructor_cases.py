"""instructor: its modes for servers with OpenAI's API; whole, partial and several objects."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from tests.clients import given
from tests.clients.given import FORMS, KEY, MESSAGES, SEED, Fox, Served

Mode = instructor.Mode
BOUND = (Mode.TOOLS, Mode.JSON_SCHEMA)  # modes that send the schema to the server


class Hint(BaseModel):
    """A model that any JSON object can be read as."""

    name: str = ""


class Weather(given.Form):
    """The weather of a city."""

    city: str = Field(max_length=12)


def client_of(server: Served, mode: Any) -> Any:
    plain = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    return instructor.from_openai(plain, mode=mode)


def fields(server: Served, **more: Any) -> dict[str, Any]:
    given_fields = {"model": server.model, "messages": MESSAGES, "seed": SEED, "max_tokens": 500}
    return given_fields | {"max_retries": 0} | more


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", BOUND, ids=lambda mode: mode.name)
def test_create(server: Served, mode: Any, form: str) -> None:
    more = {"logit_bias": given.brief(server)} if form == "recursive" else {}
    found = client_of(server, mode).create(response_model=FORMS[form], **fields(server, **more))
    assert isinstance(found, FORMS[form])


def test_tools_strict(server: Served) -> None:
    found = client_of(server, Mode.TOOLS_STRICT).create(response_model=Fox, **fields(server))
    assert isinstance(found, Fox)


def test_json(server: Served) -> None:
    """The request asks only for an object, without a schema."""
    more = fields(server, logit_bias=given.brief(server))
    assert isinstance(client_of(server, Mode.JSON).create(response_model=Hint, **more), Hint)


def test_md_json(server: Served) -> None:
    """The mode sends no format. The fence and its content come from vLLM's field."""
    form = {
        "structured_outputs": {"regex": '```json\n\\{"name": "[a-z]{3,8}", "age": 1?[0-9]\\}\n```'}
    }
    more = fields(server, extra_body=form)
    assert isinstance(client_of(server, Mode.MD_JSON).create(response_model=Fox, **more), Fox)


def test_parallel_tools(server: Served) -> None:
    """instructor lets the model choose whether to call; here a hook forces it."""

    def insist(request: Any) -> None:
        body = request.content.replace(b'"tool_choice":"auto"', b'"tool_choice":"required"')
        assert body != request.content
        request.headers["Content-Length"] = str(len(body))
        request.stream = type(request.stream)(body)

    hooks = {"request": [insist]}
    http = openai.DefaultHttpxClient(event_hooks=hooks)
    plain = openai.OpenAI(base_url=server.url, api_key=KEY, http_client=http, max_retries=0)
    client = instructor.from_openai(plain, mode=Mode.PARALLEL_TOOLS)
    found = list(client.create(response_model=Iterable[Fox | Weather], **fields(server)))
    assert found and all(isinstance(each, Fox | Weather) for each in found)


@pytest.mark.parametrize("mode", BOUND, ids=lambda mode: mode.name)
def test_partial(server: Served, mode: Any) -> None:
    client = client_of(server, mode)
    found = list(client.create_partial(response_model=given.Owned, **fields(server)))
    assert len(found) > 1 and found[-1].den.owner.age is not None
    given.Owned.model_validate(found[-1].model_dump())


def test_iterable(server: Served) -> None:
    """The mode is TOOLS: with a schema, instructor allows other fields next to the list. It also
    looks for braces in texts, so texts are kept empty."""
    client = client_of(server, Mode.TOOLS)
    more = {"max_tokens": 1500, "logit_bias": given.brief(server)}
    found = list(client.create_iterable(response_model=Fox, **fields(server, **more)))
    assert all(isinstance(each, Fox) for each in found)


def test_simple_types(server: Served) -> None:
    client = client_of(server, Mode.TOOLS)
    found = client.create(response_model=Literal["red", "blue"], **fields(server))
    assert found in ("red", "blue")


def test_with_completion(server: Served) -> None:
    client = client_of(server, Mode.TOOLS)
    found, raw = client.create_with_completion(response_model=Fox, **fields(server))
    assert isinstance(found, Fox) and raw.usage.completion_tokens > 0


def test_async(server: Served, run: Any) -> None:
    async def create_one() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, timeout=60) as plain:
            client = instructor.from_openai(plain, mode=Mode.JSON_SCHEMA)
            return await client.create(response_model=Fox, **fields(server))

    assert isinstance(run(create_one()), Fox)


@pytest.mark.parametrize("mode", BOUND, ids=lambda mode: mode.name)
def test_refused_answer_is_requested_again(server: Served, mode: Any) -> None:
    """A refused answer is sent back with the reason, and the model answers again."""
    seen: list[str] = []

    class Picky(given.Form):
        name: str = Field(max_length=8)

        @field_validator("name")
        @classmethod
        def second(cls, value: str, info: ValidationInfo) -> str:
            seen.append(value)
            assert len(seen) > 1, "try another"
            return value

    found = client_of(server, mode).create(response_model=Picky, **fields(server, max_retries=2))
    assert isinstance(found, Picky) and len(seen) == 2
