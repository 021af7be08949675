"""Inputs of all clients: the servers' addresses, the requested formats, and tools.

All texts and lists have bounds, so that each constrained model ends its answer. The models are the
weak demo model and one with random weights.
"""

import json
import os
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

SEED = 7
ASK = "Name a fox."
MESSAGES: list[Any] = [{"role": "user", "content": ASK}]
KEY = "none"  # clients insist on one


# A PNG file of 56 x 56 grey pixels, which are 4 tokens.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAAAAACN7WTCAAAAJElEQVR42u3LMQ0AAAwDoEqv9FpYdsNP+hRRFEVR"
    "FEVRFMWbAclXIFtsqkldAAAAAElFTkSuQmCC"
)
IMAGE_TOKENS = 4


@dataclass(frozen=True)
class Served:
    """A model of a running server. url: with /v1."""

    model: str
    url: str

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request that is sent without a client."""
        data = json.dumps({"model": self.model} | body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url.removesuffix("/v1") + path, data, kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def served(model: str) -> Served:
    return Served(model, os.environ[f"QUIRE_{model.upper()}_URL"])


def brief(server: Served) -> dict[str, int]:
    """Return a logit_bias that ends any JSON soon: texts and objects close as early as allowed."""
    found: dict[str, int] = {}
    for text, bias in (('"', 100), ("]", 95), ("}", 90)):
        tokens = server.post("/tokenize", {"prompt": text})["tokens"]
        assert len(tokens) == 1
        found[str(tokens[0])] = bias
    return found


class Form(BaseModel):
    """An object without further properties, which a weak model would add endlessly."""

    model_config = ConfigDict(extra="forbid")


class Fox(Form):
    """A fox."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)


class Color(StrEnum):
    RED = "red"
    GREY = "grey"


class Den(Form):
    street: str = Field(max_length=10)
    owner: Fox


class Owned(Form):
    """One object in another."""

    fox: Fox
    den: Den


class Coat(Form):
    color: Color
    length: Literal["short", "long"]


class Maybe(Form):
    name: str = Field(max_length=8)
    nickname: str | None = Field(default=None, max_length=8)
    den: Fox | None = None


class Cash(Form):
    kind: Literal["cash"]
    amount: int = Field(ge=1, le=99)


class Card(Form):
    kind: Literal["card"]
    number: str = Field(max_length=6)


class Payment(Form):
    """One of two objects."""

    how: Cash | Card


class Foxes(Form):
    foxes: list[Fox] = Field(min_length=1, max_length=3)


class Chain(Form):
    """An object with an optional object of its own type as the first field, so that few follow."""

    next: "Chain | None"
    name: str = Field(max_length=4)


class Tag(Form):
    """Texts of a certain form."""

    id: UUID
    code: str = Field(pattern="^[A-Z]{2}-[0-9]{3}$")


FORMS: dict[str, type[BaseModel]] = {
    "flat": Fox,
    "nested": Owned,
    "enum": Coat,
    "optional": Maybe,
    "union": Payment,
    "list": Foxes,
    "recursive": Chain,
    "formats": Tag,
}


class GetWeather(Form):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


class Add(Form):
    """Add two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


ARGUMENTS: dict[str, type[BaseModel]] = {"get_weather": GetWeather, "add": Add}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": kind.__doc__,
            "parameters": kind.model_json_schema(),
        },
    }
    for name, kind in ARGUMENTS.items()
]


def named(name: str) -> dict[str, Any]:
    """Return the tool_choice that forces this tool."""
    return {"type": "function", "function": {"name": name}}


def check_call(name: str, arguments: str) -> None:
    """Check a call of a given tool, with arguments that its schema allows."""
    ARGUMENTS[name].model_validate_json(arguments)
