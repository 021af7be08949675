"""Fill in the middle: convert a prompt and its `suffix` to token ids.

Models that support it have special tokens with known names:

    [begin of sequence] FIRST prompt BETWEEN suffix LAST  ->  the model writes the middle
"""

from dataclasses import dataclass

from quire.render.tokens.tokenizer import Tokenizer

# Precedes a suffix for tokenizers that put a blank before each text; its tokens are removed again.
ANCHOR = "\n"
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # the blank as these tokenizers write it
BAR = "\N{FULLWIDTH VERTICAL LINE}"


@dataclass(frozen=True)
class InfillTokens:
    """Names of one model family's infill tokens."""

    first: str  # before the prompt
    between: str  # between prompt and suffix
    last: str  # after the suffix
    ends: tuple[str, ...] = ()  # may end the answer, besides the end of sequence


FAMILIES = (
    InfillTokens(  # Qwen 2.5 Coder, CodeGemma
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    InfillTokens(  # StarCoder and StarCoder 2, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    InfillTokens(  # Code Llama
        f"{BLANK}<PRE>", f"{BLANK}<SUF>", f"{BLANK}<MID>", (f"{BLANK}<EOT>",),
    ),
    InfillTokens(  # DeepSeek Coder
        f"<{BAR}fim{BLANK}begin{BAR}>", f"<{BAR}fim{BLANK}hole{BAR}>", f"<{BAR}fim{BLANK}end{BAR}>"
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Infill:
    """Builds infill prompts for one tokenizer."""

    tokenizer: Tokenizer
    first: int  # token before the prompt
    between: int  # token between prompt and suffix
    last: int  # token after the suffix
    ends: tuple[int, ...]  # tokens that end the answer, besides the end of sequence

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infill | None":
        """Return the Infill of the first family whose tokens exist; None if there is none."""
        for family in FAMILIES:
            names = (family.first, family.between, family.last)
            ids = [found for name in names if (found := tokenizer.token_id(name)) is not None]
            if len(ids) == len(names):
                first, between, last = ids
                known = (tokenizer.token_id(name) for name in family.ends)
                ends = tuple(each for each in known if each is not None)
                return cls(tokenizer, first, between, last, ends)
        return None

    def prompt(
        self, before: str | list[int], after: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of an infill prompt.

        before: text or token ids. Only a text gets the begin token, if the tokenizer adds one.
        Raises RequestError for text that the tokenizer rejects."""
        begin: list[int] = []
        if isinstance(before, str):
            bos = self.tokenizer.bos_token_id
            has_begin = add_special_tokens and bos in self.tokenizer.encode("")[:1]
            begin = [bos] if has_begin and bos is not None else []
            before = self.tokenizer.encode(before, add_special_tokens=False)
        return [*begin, self.first, *before, self.between, *self._continued(after), self.last]

    def _continued(self, text: str) -> list[int]:
        """Tokenize the suffix as the continuation of a text, without a blank at its start."""
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        anchor = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
        if not (self.tokenizer.token(anchor[0]) or "").startswith(BLANK):
            return plain
        joined = self.tokenizer.encode(ANCHOR + text, add_special_tokens=False)
        return joined[len(anchor) :] if joined[: len(anchor)] == anchor else plain
