"""From the name of a model on the hub to its files on this machine.

A name is `org/repo`, or `org/repo:TAG` where TAG is a quantisation or a file's name. A repository
with safetensors files gives a directory. One with GGUF files gives one file: the downloaded one if
there is one, otherwise the best one for this machine.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError, ModelNotFound
from quire.models.library import hub
from quire.models.library.gguf_choice import (
    Choice,
    best_choice,
    candidates_of,
    listed,
    machine_memory_bytes,
    named_choice,
)

logger = logging.getLogger("quire")

CONFIG = "config.json"
SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class HubRequest:
    """A model to find. patterns: files to download if it has no GGUF files. without: patterns of
    files to skip. progress: whether to show progress bars, and the reason of a choice.
    refresh: whether to look for a newer revision and verify checksums. is_whole: returns whether a
    directory holds all files of a checkpoint."""

    name: str
    revision: str | None
    patterns: tuple[str, ...]
    is_whole: Callable[[Path], bool]
    without: Sequence[str] = ()
    progress: bool = True
    refresh: bool = False

    @property
    def repo(self) -> str:
        return self.name.partition(":")[0]

    @property
    def tag(self) -> str:
        return self.name.partition(":")[2]

    @property
    def needs_weights(self) -> bool:
        return any(each.endswith(SAFETENSORS) for each in self.patterns)


def hub_model(request: HubRequest, advice: str) -> Path:
    """Return the directory or the GGUF file of a model, downloading what is missing.

    advice: what to do if there is no such model. Raises ModelNotFound, and ModelError if the
    download fails."""
    have = hub.cached_files(request.repo, request.revision)
    if not request.refresh and (found := _downloaded_gguf(request, have)):
        return found
    is_here = (
        CONFIG in have
        and request.is_whole(have[CONFIG].parent)
        and not (request.refresh or request.tag)
    )
    listing = None
    if (request.needs_weights or request.tag) and not is_here:
        listing = hub.list_files(request.repo, request.revision)
        if listing is None and request.tag:
            raise ModelNotFound(_unreachable(request, have))
    if listing is not None and (request.tag or _is_of_gguf(listing)):
        return _fetched_gguf(request, listing)
    if listing is not None:
        names = listing.matching(request.patterns, request.without)
        hub.prefetch(listing, names)
        if request.refresh:
            hub.verify(listing, names)
    return _snapshot(request, advice)


def _downloaded_gguf(request: HubRequest, have: dict[str, Path]) -> Path | None:
    """Return a downloaded GGUF file that matches; None if there is none."""
    candidates = candidates_of({name: path.stat().st_size for name, path in have.items()})
    if not candidates or (not request.tag and _has_safetensors(have)):
        return None
    try:
        if request.tag:
            choice = named_choice(candidates, request.tag, request.repo)
        else:
            choice = best_choice(candidates, machine_memory_bytes(), request.repo)
    except ModelError:  # the hub may have a file that fits
        return None
    if request.progress and len(candidates) > 1 and not request.tag:
        logger.info("using %s, of the downloaded %s", choice.candidate.label, listed(candidates))
    return have[choice.candidate.files[0]]


def _fetched_gguf(request: HubRequest, listing: hub.Listing) -> Path:
    choice = _choice(request, listing)
    names = choice.candidate.files
    if request.progress:
        logger.info("%s: %s", request.repo, choice.reason)
    directory = hub.fetch(listing, names, request.revision, _options(request))
    if request.refresh:
        hub.verify(listing, names)
    return directory / names[0]


def _choice(request: HubRequest, listing: hub.Listing) -> Choice:
    if request.tag:
        return named_choice(listing.gguf, request.tag, request.repo)
    return best_choice(listing.gguf, machine_memory_bytes(), request.repo)


def _snapshot(request: HubRequest, advice: str) -> Path:
    """Download the files that match the patterns, unless the hub's cache has them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        directory = Path(
            snapshot_download(
                request.repo,
                revision=request.revision,
                allow_patterns=list(request.patterns),
                ignore_patterns=list(request.without),
                **_options(request),
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        at = f" at revision {request.revision!r}" if request.revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        reason = reason.removeprefix("Got: ").rstrip(".")
        raise ModelNotFound(
            f"{request.name!r} is not a directory, and the Hugging Face hub did not return it{at}:"
            f" {reason}. {advice}"
        ) from error
    if not request.needs_weights and CONFIG in request.patterns:
        _check_config(request, directory)
    return directory


def _check_config(request: HubRequest, directory: Path) -> None:
    """Raise ModelNotFound if a repository has its config only within GGUF files."""
    if (directory / CONFIG).exists():
        return
    listing = hub.list_files(request.repo, request.revision)
    if listing is not None and listing.gguf:
        raise ModelNotFound(
            f"{request.repo} has GGUF files, which are read after the download: run `quire pull"
            f" {request.repo}` or append one of {listed(listing.gguf)}, as {request.repo}:NAME."
        )


def _options(request: HubRequest) -> dict[str, Any]:
    if request.progress:
        return {"tqdm_class": None}
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            tqdm.__init__(self, *args, **(kwargs | {"disable": True}))

    return {"tqdm_class": NoBar}


def _has_safetensors(names: Iterable[str]) -> bool:
    return any(name.endswith(SAFETENSORS) for name in names)


def _is_of_gguf(listing: hub.Listing) -> bool:
    return bool(listing.gguf) and not _has_safetensors(listing.files)


def _unreachable(request: HubRequest, have: dict[str, Path]) -> str:
    candidates = candidates_of({name: path.stat().st_size for name, path in have.items()})
    return (
        f"{request.name!r} is not on this machine, and the Hugging Face hub cannot be reached (or"
        f" HF_HUB_OFFLINE is set). Downloaded files of {request.repo}: {listed(candidates)}."
    )
