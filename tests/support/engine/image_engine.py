"""Engines on tiny checkpoints that read images, and transformers' answers to the same prompts.

Words of the vocabulary are single characters, so that grammars have something to allow.
"""

import hashlib
import string
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers as tk
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.base.messages import Request
from quire.base.requests.media_items import MediaItem
from quire.render.answers.grammar import params_grammar
from quire.render.renderer import RenderedPrompt
from tests.support.models.multimodal import (
    IMAGE_TOKEN,
    Prompt,
    prompt_of,
    reference_logits,
    write_multimodal,
)
from tests.support.models.reference_checkpoints import pool_bytes

NUM_TOKENS = 10
BLOCK = 4
NEAR = 3e-6  # logits are float64, log-probabilities float32
VOCAB_SIZE = 64
WORDS = (  # 0120 is a space, as byte-level tokenizers write it
    "<pad>", "<s>", "</s>", *string.ascii_lowercase, *string.digits, "\u0120",
    *".!?{}\":,-[]_'", *"ABCDEFG", "<image>", "<video>", "<start>", "<end>",
)  # fmt: skip
IMAGES = ([0], [1, 2], [2, 1, 0], [], [1])  # of the prompts, by number
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Images:
    """A tiny checkpoint of a family, and transformers' model of it, in float64."""

    folder: Path
    family: str
    reference: Any
    _known: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def write(cls, folder: Path, family: str, **text: Any) -> "Images":
        """Write a checkpoint with a tokenizer. text: changes of the text part's config."""
        reference = write_multimodal(folder, family, vocab_size=VOCAB_SIZE, **text)
        assert len(WORDS) == VOCAB_SIZE
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        backend = tk.Tokenizer(tk.models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = tk.pre_tokenizers.Sequence(
            [
                tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                tk.pre_tokenizers.Split("", "isolated"),
            ]
        )
        backend.decoder = tk.decoders.ByteLevel()
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        return cls(folder, family, reference)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts with several images of odd sizes, and one of text."""
        return [prompt_of(self.family, numbers) for numbers in IMAGES]

    @property
    def max_len(self) -> int:
        """Return the tokens of the longest prompt and its answer."""
        return max(len(prompt.tokens) for prompt in self.prompts) + NUM_TOKENS

    @property
    def longest(self) -> int:
        """Return the tokens of the longest item."""
        return max(length for prompt in self.prompts for length in prompt.lengths)

    @property
    def few_blocks(self) -> int:
        """Return the blocks of a pool that is too small for all prompts together."""
        return -(-self.max_len // BLOCK) + 2

    def logprobs(self, prompt: Prompt, more: list[int]) -> torch.Tensor:
        """Return transformers' log-probabilities after each token, [T, V]. more: of an answer."""
        whole = Prompt([*prompt.tokens, *more], prompt.images, prompt.sizes)
        key = tuple(whole.tokens), tuple(item.digest for item in self.items(prompt))
        if key not in self._known:
            logits = reference_logits(self.reference, self.family, whole)
            self._known[key] = logits.log_softmax(-1)
        return self._known[key]

    def open(self, num_blocks: int = 500, **settings: Any) -> LLM:
        """Open an engine in float64. num_blocks: of the pool."""
        own = {"dtype": "float64", "max_model_len": self.max_len, "block_size": BLOCK}
        own |= {
            "disable_log_stats": True,
            "watermark": 0.0,
            "scheduling_policy": "fifo",
            "max_num_seqs": 8,
        }
        size = int(settings.get("block_size", BLOCK))
        own["kv_cache_memory_bytes"] = pool_bytes(self.folder, num_blocks, size)
        return LLM(str(self.folder), **(own | settings))

    def items(self, prompt: Prompt) -> tuple[MediaItem, ...]:
        """Return the items of a prompt."""
        found = []
        for (start, image), length in zip(prompt.images, prompt.lengths, strict=True):
            pixels = np.ascontiguousarray(image.pixels)
            table = np.asarray(image.table, np.float32).tobytes()
            digest = hashlib.sha256(pixels.tobytes() + table + str(image.grid).encode()).digest()
            item = MediaItem(
                start,
                length,
                digest,
                grid=tuple(image.grid),
                shape=pixels.shape,
                pixels=pixels.tobytes(),
                table=table,
                is_whole=self.family == "gemma3",
            )
            found.append(item)
        return tuple(found)

    def rendered(self, prompt: Prompt) -> RenderedPrompt:
        """Return a prompt as a renderer makes it."""
        return RenderedPrompt(prompt.tokens, media=self.items(prompt))

    def request(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> Request:
        """Make a request of a prompt."""
        rendered = self.rendered(prompt)
        grammar = params_grammar(llm.engine.renderer, params, rendered)
        return llm.engine.requests.make(rendered, params, grammar=grammar)

    def ask(
        self, llm: LLM, prompts: list[Prompt], params: SamplingParams = GREEDY, **fields: Any
    ) -> list[RequestOutput]:
        """Answer prompts side by side. fields: of the requests."""
        made = [self.request(llm, prompt, params) for prompt in prompts]
        asked = [msgspec.structs.replace(request, **fields) for request in made]
        return finished(llm, asked)

    def check(self, prompt: Prompt, output: RequestOutput) -> None:
        """Assert that each choice has transformers' log-probabilities."""
        for choice in output.outputs:
            assert choice.error is None and choice.token_ids and choice.logprobs is not None
            wanted = self.next_logprobs(prompt, choice.token_ids)
            for token, found, row in zip(choice.token_ids, choice.logprobs, wanted, strict=False):
                assert abs(found[token].logprob - float(row[token])) < NEAR

    def next_logprobs(self, prompt: Prompt, tokens: list[int]) -> torch.Tensor:
        """Return transformers' log-probabilities for each of the tokens after a prompt. They end
        after an image token, which a random model may choose and transformers cannot continue."""
        given = tokens[: tokens.index(IMAGE_TOKEN)] if IMAGE_TOKEN in tokens else tokens
        return self.logprobs(prompt, given)[len(prompt.tokens) - 1 :][: len(tokens)]

    def check_greedy(self, llm: LLM, prompts: list[Prompt]) -> list[RequestOutput]:
        """Assert that greedy answers, side by side, are transformers'. Return them."""
        outputs = self.ask(llm, prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(prompt, output)
            tokens = output.outputs[0].token_ids
            wanted = self.next_logprobs(prompt, tokens).argmax(-1).tolist()
            assert tokens[: len(wanted)] == wanted and len(tokens) == NUM_TOKENS
        return outputs


def other_pictures(prompt: Prompt) -> Prompt:
    """Return a prompt of the same tokens with other pixels."""
    images = [(start, replace(image, pixels=255 - image.pixels)) for start, image in prompt.images]
    return replace(prompt, images=images)


def finished(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    """Return the last outputs of requests, which run side by side."""
    found: dict[str, RequestOutput] = {}
    for request in requests:
        llm.engine.client.add(request, "")
    while len(found) < len(requests):
        found |= {each.request_id: each for each in llm.engine.client.step() if each.finished}
    return [found[request.request_id] for request in requests]
