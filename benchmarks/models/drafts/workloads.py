"""Requests to the demo model for the benchmark of draft tokens, with tenants' usual grammars.

    copying      repeat a text of the prompt
    tools        call one of the offered tools; the answer is constrained to calls (`required`)
    json         list the facts of a text as JSON records, by a schema and without white space
    prose        tell a story
    code edits   write some lines of code again after their first lines with a new name
    random       temperature 2: no text comes twice

All but the last are greedy. A workload gives new requests each time, so that no drafter has seen an
answer before. Eight agents with tools of their own make the tool calls, as each grammar is compiled
once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from demo_model import chat, copying, stories, tool_families, tools
from demo_model.item import Item, assistant, user
from demo_model.words import COLOURS, NAMES, OBJECTS, article
from quire import SamplingParams, StructuredOutputsParams
from quire.engine.client.admission import checked_grammar
from quire.engine.start.build import Engine
from quire.render.answers.calls import Tool
from quire.render.answers.format import RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.renderer import RenderedPrompt

MAX_TOKENS = 64  # of an answer
NUM_AGENTS, MAX_TOOLS = 8, 4
NUM_RECORDS = 3
NUM_LINES, NUM_EDITED = 10, 3  # lines of code in a prompt, and of its new version
TEXT = {"type": "string", "maxLength": 12}
COLOUR = {"enum": COLOURS}
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": TEXT, "colour": COLOUR, "object": TEXT},
        "required": ["name", "colour", "object"],
        "additionalProperties": False,
    },
    "minItems": NUM_RECORDS,
    "maxItems": NUM_RECORDS,
}


@dataclass(frozen=True)
class DraftRequest:
    """Request of the benchmark. grammar: of its answer; empty if it is unconstrained."""

    prompt: RenderedPrompt
    params: SamplingParams
    grammar: str = ""


class Workloads:
    """Maker of requests for an engine of the demo model, the same ones for the same seed."""

    def __init__(self, engine: Engine, seed: int = 1) -> None:
        self._engine, self._seed = engine, seed
        self._makers: dict[str, Callable[[random.Random, int], DraftRequest]] = {
            "copying": self._copying, "tools": self._tools, "json": self._json,
            "prose": self._prose, "code edits": self._code_edits, "random": self._random,
        }  # fmt: skip

    def requests(self, workload: str, number: int, num: int) -> list[DraftRequest]:
        """Return the requests of a workload's set with this number."""
        rng = random.Random(f"{self._seed} {workload} {number} {num}")
        return [self._makers[workload](rng, i) for i in range(num)]

    def _request(self, text: str, grammar: str = "", **params: Any) -> DraftRequest:
        given = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "detokenize": False} | params
        return DraftRequest(self._engine.renderer.render(text), SamplingParams(**given), grammar)

    def _prompt(self, content: str) -> str:
        return chat.render_prompt(Item("", [user(content), assistant("")], content))

    def _copying(self, rng: random.Random, _: int) -> DraftRequest:
        return self._request(chat.render_prompt(copying.make(rng, longest=40)))

    def _tools(self, rng: random.Random, number: int) -> DraftRequest:
        agent = self._agents[number % NUM_AGENTS]
        values = [argument.draw(rng) for argument in agent.family.arguments]
        content = rng.choice(agent.family.requests.split("|")).format(*values)
        item = Item("tools", [user(content), assistant("")], content, tools=agent.tools)
        return self._request(chat.render_prompt(item), agent.grammar)

    def _json(self, rng: random.Random, _: int) -> DraftRequest:
        text = " ".join(
            f"{rng.choice(NAMES)} has {article(colour)} {rng.choice(OBJECTS)}."
            for colour in rng.sample(COLOURS, NUM_RECORDS)
        )
        return self._request(self._prompt(f"{text}\n\nList the facts as JSON."), self._schema)

    def _prose(self, rng: random.Random, _: int) -> DraftRequest:
        hero = stories.new_slots(rng)["kind"]
        return self._request(self._prompt(f"Tell me a story about {article(hero)}."))

    def _code_edits(self, rng: random.Random, _: int) -> DraftRequest:
        old, new, *names = rng.sample(OBJECTS, 6)
        lines = [_line(rng, [old, *names]) for _ in range(NUM_LINES)]
        begun = "".join(line.replace(old, new) for line in lines[:NUM_EDITED])
        return self._request(self._prompt("Write this again: " + "".join(lines)) + begun)

    def _random(self, rng: random.Random, _: int) -> DraftRequest:
        words = " ".join(rng.sample(OBJECTS, 8))
        seed = rng.randrange(1 << 32)
        return self._request(words, temperature=2.0, seed=seed, ignore_eos=True)

    @cached_property
    def _schema(self) -> str:
        form = StructuredOutputsParams(json=RECORDS, disable_any_whitespace=True)
        params, prompt = SamplingParams(structured_outputs=form), RenderedPrompt([1])
        return checked_grammar(self._engine.renderer, params, prompt)

    @cached_property
    def _agents(self) -> list["Agent"]:
        rng = random.Random(f"{self._seed} agents")
        return [self._agent(rng, family) for family in tool_families.FAMILIES[:NUM_AGENTS]]

    def _agent(self, rng: random.Random, family: tool_families.Family) -> "Agent":
        others = [each for each in tool_families.FAMILIES if each is not family]
        families = [family, *rng.sample(others, rng.randrange(MAX_TOOLS))]
        offered = [tools.offered(rng, each) for each in families]
        functions = [tool["function"] for tool in offered]
        renderer = self._engine.renderer
        known = tuple(Tool(each["name"], each["parameters"]) for each in functions)
        requested = RequestedAnswer(renderer.answer_format(None, True), known, "required")
        assert renderer.tokenizer is not None
        grammar = answer_grammar(requested, renderer.tokenizer.added_ids)
        rng.shuffle(offered)
        return Agent(family, offered, grammar)


@dataclass(frozen=True)
class Agent:
    """Client that offers the same tools in each request. family: the tool that requests need."""

    family: tool_families.Family
    tools: list[dict[str, Any]]
    grammar: str


def _line(rng: random.Random, names: list[str]) -> str:
    """Return a line of code that uses some of the names."""
    first, second, number = rng.choice(names), rng.choice(names), rng.randrange(100)
    return rng.choice((
        f"{first} = {second} + {number}\n", f"if {first} > {second}:\n",
        f"    {first} = get({second}, {number})\n", f"    return {first}[{number}]\n",
        f"for {first} in {second}:\n", f"    {first} += {number}\n",
    ))  # fmt: skip
