"""Filling in between two texts (fill in the middle): a prompt and its `suffix`, to token ids.

Models that can do it have tokens of their own for it, which are known by their names:

    [begin of sequence] FIRST the prompt BETWEEN the suffix LAST  ->  what stands between
"""

from dataclasses import dataclass

from quire.render.tokens.tokenizer import Tokenizer

# Stands before a suffix where a tokenizer puts a blank before a text; its tokens are taken off.
ANCHOR = "\n"
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how such tokenizers write it
BAR = "\N{FULLWIDTH VERTICAL LINE}"


@dataclass(frozen=True)
class InfillTokens:
    """Names of the tokens before, between and behind the texts, and of those that end the answer
    beside the end of sequence, as far as a vocabulary has them."""

    first: str
    between: str
    last: str
    ends: tuple[str, ...] = ()


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
    """How a tokenizer's model fills in. first, between, last: token ids; ends: of tokens that end
    an answer."""

    tokenizer: Tokenizer
    first: int
    between: int
    last: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infill | None":
        """Find the tokens of one of the families; None for a model that does not fill in."""
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
        """Return the token ids of a prompt. before: the text, or token ids, which then also say
        whether the sequence has a begin. Raises RequestError for text that is none."""
        begin: list[int] = []
        if isinstance(before, str):
            bos = self.tokenizer.bos_token_id
            has_begin = add_special_tokens and bos in self.tokenizer.encode("")[:1]
            begin = [bos] if has_begin and bos is not None else []
            before = self.tokenizer.encode(before, add_special_tokens=False)
        return [*begin, self.first, *before, self.between, *self._continued(after), self.last]

    def _continued(self, text: str) -> list[int]:
        """Return the tokens of a text as it stands in the middle of another one."""
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        anchor = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
        if not (self.tokenizer.token(anchor[0]) or "").startswith(BLANK):
            return plain
        joined = self.tokenizer.encode(ANCHOR + text, add_special_tokens=False)
        return joined[len(anchor) :] if joined[: len(anchor)] == anchor else plain
