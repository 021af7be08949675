"""llm-comply: answers against the published schemas of OpenAI's and Anthropic's APIs.

Each deviation is listed with its reason. A listed deviation that passes fails the test as well.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.given import KEY, Served

BEARER = ["--auth-header", "Authorization"]
NO_BEARER = ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
FORMATS = {"open-responses": BEARER, "openai-chat": BEARER, "anthropic": NO_BEARER}
NO_IMAGES = "the demo model reads no images"
DEFAULT_MODEL = "a request without a model gets the server's first one"
NO_COMPACTION = "there is no compaction: the path answers 405"
# Failed check -> reason.
DEVIATIONS = {
    "open-responses": {
        "image-input": NO_IMAGES,
        "compact-response": NO_COMPACTION,
        "compact-missing-model": NO_COMPACTION,
        "error-handling": DEFAULT_MODEL,
    },
    "openai-chat": {"chat-image-input": NO_IMAGES, "chat-error-handling": DEFAULT_MODEL},
    "anthropic": {"anth-image-input": NO_IMAGES},
}
IMAGES = {
    "open-responses": "image-input",
    "openai-chat": "chat-image-input",
    "anthropic": "anth-image-input",
}


def checked(server: Served, form: str, *flags: str) -> dict[str, Any]:
    """Run the checks of a format; return their results by name."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "--format", form]
    command += ["-u", server.url, "-k", KEY, "-m", server.model, "--json", *FORMATS[form], *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr[-2000:]
    return {each["id"]: each for each in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize("form", FORMATS)
def test_answers_fit_the_schemas(
    demo: Served, form: str, record_property: Callable[[str, object], None]
) -> None:
    found = checked(demo, form)
    for name, reason in DEVIATIONS[form].items():
        record_property("differs", f"{form} {name}: {reason}")
    assert len(found) >= 9
    failed = {name: each["errors"] for name, each in found.items() if each["status"] == "failed"}
    assert set(failed) == set(DEVIATIONS[form]), failed


@pytest.mark.parametrize("form", FORMATS)
def test_images_are_read(seeing: Served, form: str) -> None:
    [found] = checked(seeing, form, "--filter", IMAGES[form]).values()
    assert found["status"] == "passed", found["errors"]
