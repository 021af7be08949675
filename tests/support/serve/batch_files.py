"""Input files for tests, and what output files hold."""

import json
from pathlib import Path
from typing import Any

from quire.serve.batches.input_index import InputIndex

MAX_LINE = 1 << 16


def request(
    custom_id: str, prompt: Any = "The sea", url: str = "/v1/completions"
) -> dict[str, Any]:
    """A line whose answer is short and always the same."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: "list[dict[str, Any] | str]") -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def index_of(path: Path, model: str = "demo", **options: Any) -> InputIndex:
    return InputIndex(path, model, options.pop("max_line_bytes", MAX_LINE), **options)
