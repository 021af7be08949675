"""The placeholders of images and videos: from a template's text to token ids.

    template    <|vision_start|><|image_pad|><|vision_end|>         a mark for each image
    expanded    the mark replaced by the family's text              a token for each item
    token ids   the token repeated `num_tokens` times               the item's span

The first step writes the same text as transformers' processors, because the tokenizer may merge the
characters around it. The second step may repeat the token in the ids instead of in the text,
because the tokenizer matches added tokens first.

A mark in a user's text is rejected, because no image belongs to it.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.base.errors import ModelError, RequestError
from quire.base.requests.media_items import MediaItem
from quire.render.media.prepared import VIDEO, PreparedMedia
from quire.render.media.processor import ImageProcessor
from quire.render.tokens.tokenizer import Tokenizer

Placed = tuple[list[int], tuple[MediaItem, ...]]


@dataclass(frozen=True)
class Placeholder:
    """The placeholder of one kind of media in a family's prompts."""

    mark: str  # text for each image, written by templates and users of `multi_modal_data`
    token: str  # token that is repeated for each feature
    # returns the text that replaces the mark, with one token per item; None for the token itself
    write: Callable[[PreparedMedia], str] | None = None
    is_whole: bool = False  # see `MediaItem`

    def text(self, media: PreparedMedia) -> str:
        """Return the text that replaces the mark."""
        return self.token if self.write is None else self.write(media)


class PackagedImages(ImageProcessor, Protocol):
    """An image processor of another package. Its class is called with the model's `ModelFiles`."""

    def placeholder(self) -> Placeholder:
        """Return the placeholder of an image."""
        ...


class Placeholders:
    """The placeholders of one model.

    by_kind: placeholder for `image`, and for `video` if the family takes videos. Videos are
    disabled if the tokenizer lacks their token. Raises ModelError if it lacks the image tokens.
    """

    def __init__(self, by_kind: Mapping[str, Placeholder], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_kind = {
            kind: each
            for kind, each in by_kind.items()
            if kind != VIDEO or tokenizer.token_id(each.token) is not None
        }
        self._kind_of = {each.mark: kind for kind, each in self._by_kind.items()}
        self._marks = re.compile("|".join(map(re.escape, self._kind_of)))
        self._ids = {kind: self._id(each.token) for kind, each in self._by_kind.items()}
        self._mark_ids = {self._id(mark): kind for mark, kind in self._kind_of.items()}
        texts = [text for each in self._by_kind.values() for text in (each.mark, each.token)]
        self._texts = tuple(dict.fromkeys(texts))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of media that the model takes."""
        return tuple(self._by_kind)

    def mark(self, kind: str) -> str:
        """Return the mark of an image or a video. Raises RequestError if the model does not take
        this kind."""
        self._check_kind(kind)
        return self._by_kind[kind].mark

    def is_whole(self, kind: str) -> bool:
        """Return whether the tokens of an item are computed together."""
        return self._by_kind[kind].is_whole

    def check_texts(self, messages: object) -> None:
        """Refuse messages whose texts hold a mark or a placeholder token. Raises RequestError."""
        if not isinstance(messages, Sequence):
            return
        for index, message in enumerate(messages):
            for text in _texts(message):
                for each in self._texts:
                    if each in text:
                        where = f"messages[{index}]"
                        raise RequestError(
                            f"{where} has the text {each!r}, which stands for an image or a video"
                            " in prompts of this model; remove it, and send images as parts.",
                            where,
                        )

    def expand(self, text: str, media: Sequence[PreparedMedia]) -> tuple[str, list[PreparedMedia]]:
        """Return a prompt with its marks replaced, and the media in the prompt's order.

        media: in the order of the marks of their kind. Raises RequestError unless each mark has
        exactly one image or video.
        """
        marks = self._marks.findall(text)
        self._check_counts(Counter(self._kind_of[mark] for mark in marks), media)
        for kind, each in self._by_kind.items():
            if each.token not in self._kind_of and each.token in text:
                raise RequestError(
                    f"the prompt has the text {each.token!r}; write {each.mark!r} for each {kind}."
                )
        waiting, ordered = self._queues(media), list[PreparedMedia]()

        def written(found: re.Match[str]) -> str:
            kind = self._kind_of[found.group()]
            ordered.append(waiting[kind].popleft())
            return self._by_kind[kind].text(ordered[-1])

        return (self._marks.sub(written, text) if marks else text), ordered

    def expand_ids(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedia]
    ) -> tuple[list[int], list[PreparedMedia]]:
        """Do the same as `expand` with token ids, in which one token is a mark.

        The text that replaces a mark is tokenized alone, not merged with its neighbours."""
        found = [self._mark_ids[each] for each in token_ids if each in self._mark_ids]
        self._check_counts(Counter(found), media)
        waiting = self._queues(media)
        ordered = [waiting[kind].popleft() for kind in found]
        rest, expanded = iter(ordered), list[int]()
        for each in token_ids:
            kind = self._mark_ids.get(each)
            if kind is None:
                expanded.append(each)
            else:
                text = self._by_kind[kind].text(next(rest))
                expanded += self._tokenizer.encode(text, add_special_tokens=False)
        return expanded, ordered

    def place(self, token_ids: Sequence[int], ordered: Sequence[PreparedMedia]) -> Placed:
        """Repeat each placeholder token, and return the ids and the items with their starts.

        ordered: the media in the prompt's order. Raises RequestError if a text of the prompt became
        a placeholder token."""
        kind_of = {token_id: kind for kind, token_id in self._ids.items()}
        items = [item for media in ordered for item in media.items]
        kinds = [media.kind for media in ordered for _ in media.items]
        places = [index for index, each in enumerate(token_ids) if each in kind_of]
        if [kind_of[token_ids[place]] for place in places] != kinds:
            raise RequestError(
                f"the prompt has {len(places)} placeholder tokens for {len(items)} items of images"
                f" and videos; remove {' and '.join(map(repr, self._texts))} from its texts."
            )
        placed, result, last = list[MediaItem](), list[int](), 0
        for place, item in zip(places, items, strict=True):
            result += token_ids[last:place]
            placed.append(item.at(len(result)))
            result += [token_ids[place]] * item.num_tokens
            last = place + 1
        result += token_ids[last:]
        return result, tuple(placed)

    def _queues(self, media: Sequence[PreparedMedia]) -> dict[str, deque[PreparedMedia]]:
        return {kind: deque(m for m in media if m.kind == kind) for kind in self._by_kind}

    def _check_counts(self, found: Counter[str], media: Sequence[PreparedMedia]) -> None:
        given = Counter(each.kind for each in media)
        for kind in given:
            self._check_kind(kind)
        for kind, each in self._by_kind.items():
            if found[kind] != given[kind]:
                raise RequestError(
                    f"the number of placeholders {each.mark!r} in the prompt is {found[kind]}, and"
                    f" the number of its {kind}s is {given[kind]}; give one {kind} for each."
                )

    def _check_kind(self, kind: str) -> None:
        if kind not in self._by_kind:
            known = " and ".join(f"{each}s" for each in self.kinds)
            raise RequestError(f"this model does not accept {kind}s; it accepts {known}.")

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.token_id(token)
        if token_id is None or token_id not in self._tokenizer.added_tokens:
            raise ModelError(
                f"the tokenizer has no added token {token!r}, which stands for images in prompts of"
                " this model; fetch the tokenizer's files again."
            )
        return token_id


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for each in value:
            yield from _texts(each)
