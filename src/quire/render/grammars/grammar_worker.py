"""A process that checks grammars: python -m quire.render.grammars.grammar_worker.

The worker compiles each grammar like the core does. Its vocabulary is all bytes plus the added
tokens that the grammar names. The grammar must allow a first token. GBNF is converted to Lark.
`job_worker.py` limits the work.

    job      JSON: the grammar's text
    answer   JSON: the grammar's text, and warnings about ignored parts
"""

import json
import re
from functools import lru_cache
from typing import Any

from quire.base.errors import RequestError
from quire.render.grammars.lark import GBNF
from quire.render.jobs.job_worker import serve_jobs

MAX_MESSAGE = 300
MIN_IDS = 1 << 10
MAX_IDS = 1 << 21  # far beyond any vocabulary
NUM_BYTES = 256


def main() -> None:
    """Check grammars one after the other until stdin closes."""
    serve_jobs(
        lambda data: json.dumps(checked(json.loads(data))),
        "the grammar cannot be read",
        warm_up=json.dumps("start: /a/").encode(),
    )


def checked(grammar: str) -> tuple[str, list[str]]:
    """Return a grammar in the core's notation, and warnings. Raises RequestError."""
    from llguidance import LLMatcher

    grammar = _as_lark(grammar)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise RequestError(shown(messages[0]))
    matcher = LLMatcher(_tokenizer(_num_ids(grammar)), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        raise RequestError("it allows no answer at all")
    if error:
        raise RequestError(shown(error))
    # Always present, because validation has no tokenizer.
    return grammar, [shown(one) for one in messages if not one.startswith("no tokenizer")]


def shown(message: str) -> str:
    """Shorten llguidance's message: drop its quotes of the grammar and cut it to MAX_MESSAGE."""
    lines = [line for line in message.split("\n") if not re.match(r"\s+(\d+ \||\^)", line)]
    text = " ".join(line.strip() for line in lines if line).split(" <state>")[0]
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", text)
    text = re.sub(r"^failed to compile JSON schema: ", "", text)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _as_lark(grammar: str) -> str:
    """Convert the GBNF members of a list of grammars to Lark."""
    if not grammar.startswith("{"):
        return grammar
    found = json.loads(grammar)
    for one in found["grammars"]:
        if GBNF in one:
            one["lark_grammar"] = _gbnf_to_lark(one.pop(GBNF))
    return json.dumps(found)


def _gbnf_to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_without_long_escapes(text))
    except RecursionError:
        raise RequestError("the GBNF is nested too deep") from None
    except Exception as error:
        raise RequestError(f"the GBNF is wrong: {shown(str(error))}") from None


def _without_long_escapes(text: str) -> str:
    r"""Replace \u and \U by their characters, because the conversion loses their zeros."""

    def plain(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        if digits is None:
            return found.group()
        code = int(digits, 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise RequestError(f"the GBNF is wrong: {found.group()} is not a character")
        return f"\\x{code:02x}" if code < 0x80 else chr(code)

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", plain, text)


def _num_ids(grammar: str) -> int:
    """Return the size of a vocabulary, a power of 2, that contains every id the grammar names."""
    named = re.findall(r"<\[([\d^,\s-]+)\]>", grammar)
    largest = max((int(one[:9]) for part in named for one in re.findall(r"\d+", part)), default=0)
    if largest >= MAX_IDS:
        raise RequestError(f"there is no token {largest}")
    return max(MIN_IDS, 1 << (largest + 1).bit_length())


@lru_cache(maxsize=4)
def _tokenizer(num_ids: int) -> Any:
    """Return a vocabulary of all bytes, filled up to `num_ids` with empty tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id = num_ids - 1
        bos_token_id = None
        tokens = [bytes([value]) for value in range(NUM_BYTES)]
        tokens += [b""] * (num_ids - NUM_BYTES - 1) + [b"\xff<EOS>"]
        special_token_ids = [num_ids - 1]

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return LLTokenizer(TokenizerWrapper(Bytes()))


if __name__ == "__main__":
    main()
