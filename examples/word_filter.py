"""A safety filter: words that nobody shall read become stars, wherever answers are cut to pieces.

    python examples/word_filter.py --word fox "Tell me a story about a fox."

A prompt with such a word is refused. What may be the beginning of a word is held back until more of
the text is there, or its end. For `quire serve` a package names the class in an entry point
(docs/extend/hooks.md).
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.base.requests.hooks import EndRequest, HookPiece, HookRequest


class WordFilter:
    def __init__(self, words: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
        self._longest = max(map(len, words))

    def before_admission(self, request: HookRequest) -> None:
        if any(map(self._pattern.search, request.texts)):
            raise EndRequest("the prompt has a word that is not allowed here.")

    def on_output(self, piece: HookPiece) -> HookPiece:
        state, key = piece.context.state, f"{piece.kind} {piece.choice}"
        text = state.pop(key, "") + piece.text
        end = len(text) if piece.is_last else max(0, len(text) - self._longest + 1)
        for word in self._pattern.finditer(text):
            if word.start() < end:  # otherwise what follows might make it a longer one
                end = max(end, word.end())
        state[key] = text[end:]
        shown = self._pattern.sub(lambda word: "*" * len(word[0]), text[:end])
        return replace(piece, text=shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--word", action="append", required=True)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM(options.model, hooks=[WordFilter(options.word)], disable_log_stats=True) as llm:
        try:
            for output in llm.stream([{"role": "user", "content": options.question}], params):
                print(output.outputs[0].text, end="", flush=True)
            print()
        except RequestError as error:
            print(f"refused: {error}")
