"""Compute a recorded answer again, and say whether it is reproduced to the bit.

A file holds a request, and the answer that a server gave to it:

    {"url": "/v1/chat/completions", "request": {...}, "response": {...}}

The request is sent to an app in this process, whose core loads the model. Tokens, texts and
log-probabilities are compared exactly. A JSON number has all digits of its float, so equal numbers
are equal bits. `system_fingerprint` shows which part of the numerics differs.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, EngineError
from quire.base.requests.numerics import differing_parts, differs, fingerprint
from quire.base.settings.config import EngineConfig, ServerConfig
from quire.engine.client.fleet import client_of
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import TextSide, build_text_side
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.serve.app import create_app
from quire.serve.batches.app_caller import AppCaller
from quire.serve.context import ApiContext
from quire.serve.processes.managed_core import ManagedCores

Json = dict[str, Any]

MAX_BYTES = 64 << 20
MAX_DEPTH = 100  # nested objects and lists of a file
TOKENS_URL = "/inference/v1/generate"
# Kind of an answer -> the path that gave it.
URLS = {"chat.completion": "/v1/chat/completions", "text_completion": "/v1/completions"}
NOT_COMPARED = {
    "id", "request_id", "created", "model", "system_fingerprint", "usage", "metrics",
    "weights_versions",
}  # fmt: skip
MAX_DIFFERENCES = 8  # that a report lists


@dataclass(frozen=True)
class RecordedAnswer:
    """A request and the answer to it."""

    url: str
    request: Json
    response: Json

    @property
    def fingerprint(self) -> str | None:
        """The numerics of the engine that answered; None if the answer does not name them."""
        found = self.response.get("system_fingerprint")
        return found if isinstance(found, str) else None


@dataclass
class AnswerReport:
    """Result of a comparison. differences: where the answers differ, the first ones. parts: parts
    of the numerics that differ, with this engine's. notes: what else the reader should know."""

    num_values: int = 0  # compared tokens, texts, log-probabilities and other values
    differences: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_reproduced(self) -> bool:
        return self.num_values > 0 and not self.differences

    def as_data(self) -> Json:
        """Return the report for a JSON file."""
        return {"is_reproduced": self.is_reproduced} | asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        if self.is_reproduced:
            yield f"reproduced to the bit: {self.num_values:,} values are equal"
        elif not self.differences:
            yield "not reproduced: nothing in the answer can be compared"
        else:
            yield "not reproduced:"
            yield from (f"  {each}" for each in self.differences)
        for name, value in self.parts.items():
            yield differs(name, f"from the recorded engine's; here: {value}")
        yield from self.notes


def read_answer(path: Path) -> RecordedAnswer:
    """Read a file. Raises ConfigError if it is not an answer that can be computed again."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES:,} bytes; give a single answer.")
        content = json.loads(path.read_bytes())
        if _is_deep(content):
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    request, response = (_object_of(content, name, path) for name in ("request", "response"))
    url = content.get("url") or URLS.get(str(response.get("object")))
    if not isinstance(url, str):
        raise ConfigError(f"{path} does not say which path answered; add url, such as"
                          " /v1/completions.")  # fmt: skip
    if request.get("stream"):
        raise ConfigError(f"{path}: the request is a stream; record an answer without stream.")
    sampling = request.get("sampling_params") if url == TOKENS_URL else request
    sampling = sampling if isinstance(sampling, dict) else {}
    if sampling.get("seed") is None and sampling.get("temperature") != 0:
        raise ConfigError(
            f"{path}: the request has no seed, so its tokens are random; give it a seed, or"
            " temperature 0."
        )
    if not _objects(response.get("choices")):
        raise ConfigError(f"{path}: the response has no choices; record a whole answer.")
    return RecordedAnswer(url, request, response)


def _is_deep(value: Any, left: int = MAX_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_is_deep(each, left - 1) for each in parts)


def _object_of(content: Any, name: str, path: Path) -> Json:
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(
            f'{path} has no object {name!r}; write {{"request": ..., "response": ...}}, as sent and'
            " as answered."
        )
    return found


def verify_answer(answer: RecordedAnswer, config: EngineConfig) -> AnswerReport:
    """Compute an answer again and compare. Raises ConfigError or EngineError if that fails."""
    source = resolve_source(config.model)
    check_model(answer, (source.name, config.model.model))
    check_before_loading(config, source)
    cores = ManagedCores(config, "warning")
    try:
        cores.start()
        text = build_text_side(config.model, source)
        text.renderer.prepare()
        cores.wait_until_ready()
        mine, numerics = asyncio.run(_answered(cores, text, source, answer))
    finally:
        cores.stop()
    return compare(answer, mine, numerics)


def check_model(answer: RecordedAnswer, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a request to another model than the one with these names."""
    name = answer.request.get("model")
    if isinstance(name, str) and name not in names:
        raise ConfigError(
            f"the request is for the model {name[:200]!r}, and this engine has {names[0]!r}."
            " Answers of adapters cannot be verified. If it is another name of the same model,"
            " remove model from the request in the file."
        )


async def _answered(
    cores: ManagedCores, text: TextSide, source: ModelSource, answer: RecordedAnswer
) -> tuple[Json, Mapping[str, str]]:
    """Return this engine's answer and its numerics."""
    client = client_of(cores.paths, text.tokenizer)
    client.start()
    try:
        await client.wait_until_ready()
        name = answer.request.get("model")
        names = (source.name, name) if isinstance(name, str) else (source.name,)
        server = ServerConfig()
        api = ApiContext(client, text.renderer, text.requests, names, server, int(time.time()))
        caller = AppCaller(create_app(api))
        reply = await caller.post(answer.url, json.dumps(answer.request).encode())
        if reply.status != 200:
            raise EngineError(f"the request failed here: {reply.body[:1000].decode()}")
        return json.loads(reply.body), client.ready.numerics
    finally:
        await client.close()


def compare(answer: RecordedAnswer, mine: Json, numerics: Mapping[str, str]) -> AnswerReport:
    """Compare an answer with this engine's answer to the same request."""
    report = AnswerReport()
    _compare(answer.response, mine, "response", report)
    own, recorded = fingerprint(numerics), answer.fingerprint
    if recorded is None or own is None:
        report.notes.append(
            "the answer has no system_fingerprint, so the numerics are not compared"
        )
        return report
    try:
        report.parts = {name: numerics[name] for name in differing_parts(recorded, own)}
    except ValueError as error:
        report.notes.append(f"the numerics are not compared: {error}")
    choices = answer.response.get("choices")
    if any(len(each.get("weights_versions", ())) > 1 for each in _objects(choices)):
        report.notes.append("several weights made the tokens, so one engine cannot repeat them")
    return report


def _objects(value: Any) -> list[Json]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _compare(theirs: Any, ours: Any, where: str, report: AnswerReport) -> None:
    """Compare two JSON values in place, part by part. Fields that only this engine's answer has do
    not count, since an older version may have answered."""
    if len(report.differences) >= MAX_DIFFERENCES:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() - NOT_COMPARED):
            _compare(theirs[name], ours.get(name), f"{where}.{name}", report)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            text = f"{where} has {len(theirs)} entries in the answer, {len(ours)} here"
            report.differences.append(text)
        for index, pair in enumerate(zip(theirs, ours, strict=False)):
            _compare(*pair, f"{where}[{index}]", report)
    else:
        report.num_values += 1
        if theirs != ours or type(theirs) is not type(ours):
            shown = [json.dumps(each)[:80] for each in (theirs, ours)]
            report.differences.append(f"{where} is {shown[0]} in the answer, {shown[1]} here")
