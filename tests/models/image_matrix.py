"""Run each family that reads images with each engine setting; write that section of
docs/use/model-table.md.

    python -m tests.models.image_matrix [FAMILY ...]     # all, or these; writes the section

A way is a set of engine settings. Greedy tokens and log-probabilities must equal transformers'.
"""

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.base.events import Stepped
from quire.engine.drafting.draft_pace import StepTimes
from tests.support.engine.image_engine import Images
from tests.support.models.vision_checkpoints import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "use" / "model-table.md"
YES = "yes"
ODD_CHUNKS = 5  # tokens; more than a whole item of Gemma 3
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
PREEMPTED = "recomputed", "swapped"
IN_RANKS = "two ranks", "two stages"


@dataclass(frozen=True)
class Way:
    """means: its text on the page. settings: the settings of an engine on a checkpoint."""

    means: str
    settings: Callable[[Images], dict[str, Any]]


WAYS: Mapping[str, Way] = {
    "odd chunks": Way(
        f"{ODD_CHUNKS} tokens in a step, which cuts images",
        lambda _: {"max_num_batched_tokens": ODD_CHUNKS, "max_num_seqs": 1},
    ),
    "small steps": Way(
        "several rows share steps of 13 tokens, planned a step ahead",
        lambda _: {"max_num_batched_tokens": 13, "pipeline_depth": 2},
    ),
    "recomputed": Way(
        "preempted rows are recomputed",
        lambda images: {"num_blocks": images.few_blocks, "preemption_mode": "recompute"},
    ),
    "swapped": Way(
        "preempted rows are swapped to host memory",
        lambda images: {"num_blocks": images.few_blocks, "preemption_mode": "swap"},
    ),
    "small cache": Way(
        "the encoder cache holds the longest image and no more",
        lambda images: {"encoder_cache_tokens": images.longest, "max_encoder_tokens": 1},
    ),
    "drafts": Way("n-gram drafts are verified", lambda _: {"speculative_config": DRAFTS}),
    "two ranks": Way("two ranks share each layer", lambda _: {"tensor_parallel_size": 2}),
    "two stages": Way(
        "two stages have half of the layers each",
        lambda _: {"pipeline_parallel_size": 2, "max_num_batched_tokens": 13},
    ),
}
SHORT_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 1]}
HEAD = """
## Models that read images

Each family is tested as a tiny checkpoint with random weights, in float64. Prompts have up to three
images of odd sizes. Each cell says that greedy tokens and their log-probabilities are
transformers'. `make test` tests one family, `make test-long` all of them;
`python -m tests.models.image_matrix` writes this section from the results.

"""
END = "\n## Other checks"


def write_tiny(folder: Path, family: str) -> Images:
    """Write a checkpoint whose text part has enough heads for two ranks."""
    text: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family in ("qwen2_vl", "qwen2_5_vl"):  # whose heads are as wide as the hidden size allows
        text |= {"head_dim": 6, "rope_parameters": SHORT_ROPE}
    return Images.write(folder, family, **text)


def check(images: Images, name: str) -> None:
    """Check that these settings give transformers' answers, and that they took effect."""
    with (
        pytest.MonkeyPatch.context() as patch,
        images.open(**WAYS[name].settings(images)) as llm,
    ):
        patch.setattr(StepTimes, "observe", lambda *_: None)  # always drafts
        steps: list[Stepped] = []
        core = llm.engine.client.core
        core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
        outputs = images.check_greedy(llm, images.prompts * 2)
        core.scheduler.check_invariants()
        media = core.scheduler.media
        assert media is not None and media.num_encoded_tokens > 0
    num_preempted = sum(each.metrics.num_preemptions for each in outputs if each.metrics)
    assert (num_preempted > 0) == (name in PREEMPTED)
    assert (sum(step.num_draft_tokens for step in steps) > 0) == (name == "drafts")


def section(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the section for results by family and way."""
    rows = [["", *WAYS], ["---"] * (len(WAYS) + 1)]
    rows += [[f"`{family}`", *(results[family][name] for name in WAYS)] for family in results]
    text = HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"
    return text + "".join(f"- **{name}**: {way.means}\n" for name, way in WAYS.items())


def read_section() -> str:
    """Return the section as it is on the page, or an empty text."""
    found = re.search(re.escape(HEAD) + ".*?(?=" + END + ")", PAGE.read_text("utf-8"), re.DOTALL)
    return found[0] if found else ""


def read_results() -> dict[str, dict[str, str]]:
    """Return the page's results, by family and way."""
    lines = [line for line in read_section().splitlines() if line.startswith("|")]
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(table[0][1:], row[1:], strict=True)) for row in table[2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Try every family in every way.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="the page keeps others")
    selected = parser.parse_args().families or list(MODELS)
    results = read_results()
    for family in selected:
        with tempfile.TemporaryDirectory() as folder:
            images = write_tiny(Path(folder), family)
            for name in WAYS:
                check(images, name)
        results[family] = dict.fromkeys(WAYS, YES)
        print(family, *WAYS, sep="\t", flush=True)
        ordered = {name: results[name] for name in MODELS if name in results}
        text, old = PAGE.read_text("utf-8"), read_section()
        text = text.replace(old, "") if old else text
        PAGE.write_text(text.replace(END, section(ordered) + END, 1), "utf-8")


if __name__ == "__main__":
    main()
