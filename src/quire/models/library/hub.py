"""Download models from the Hugging Face hub into its cache.

Large files are fetched to `blobs/SHA256.quire-part`, which a later start continues. A file enters
the cache only after its checksum was verified. `huggingface_hub` fetches the small files and makes
the snapshot of links, so other programs find the model as well. HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE are the hub's.
"""

import difflib
import fcntl
import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from quire.base.errors import ModelError, ModelNotFound
from quire.models.library.gguf_choice import GGUFCandidate, candidates_of, in_units
from quire.models.library.local import local_models

logger = logging.getLogger("quire")

DEFAULT_REVISION = "main"
PARTIAL = ".quire-part"
RESERVE_BYTES = 256 << 20  # disk space that stays free
MAX_SUGGESTIONS, MAX_SEARCHED = 3, 100
LIST_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. sha256: known for large files only."""

    num_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    repo: str
    commit: str
    files: dict[str, HubFile]

    def matching(self, patterns: Sequence[str], without: Sequence[str] = ()) -> list[str]:
        """Return the files that match one of the patterns and none of `without`."""
        return [
            name
            for name in self.files
            if any(fnmatch(name, each) for each in patterns)
            and not any(fnmatch(name, each) for each in without)
        ]

    @property
    def gguf(self) -> list[GGUFCandidate]:
        return candidates_of({name: file.num_bytes for name, file in self.files.items()})


def list_files(repo: str, revision: str | None) -> Listing | None:
    """Return the files of a repository; None if the hub cannot be reached or is not to be.

    Raises ModelNotFound if the hub has no such repository or revision, or denies access."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=LIST_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repo!r} is a gated model: accept its conditions at {_page(repo)}, then set HF_TOKEN"
            " to a token of your account."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(
            f"{repo!r} has no revision {revision!r}; --revision takes a branch, a tag or a commit."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(_unknown(repo)) from error
    except _network_errors() as error:
        logger.debug("the files of %s cannot be listed: %s", repo, error)
        return None
    files = {}
    for each in info.siblings or ():
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        files[each.rfilename] = HubFile(each.size or 0, sha256)
    return Listing(repo, info.sha or "", files)


def fetch(
    listing: Listing, names: Sequence[str], revision: str | None, options: dict[str, Any]
) -> Path:
    """Download files of a repository, and return the directory of its snapshot.

    options: for `snapshot_download`. Raises ModelError without enough disk space, and for a file
    that does not have its checksum."""
    from huggingface_hub import snapshot_download

    prefetch(listing, names)
    return Path(
        snapshot_download(listing.repo, revision=revision, allow_patterns=list(names), **options)
    )


def prefetch(listing: Listing, names: Sequence[str]) -> None:
    """Put the large ones of these files into the hub's cache. Raises ModelError."""
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

    folder = repo_folder(listing.repo)
    _check_space(listing, names, folder)
    for name in names:
        file = listing.files[name]
        # Without a checksum a file is small; above the limit the library has its own protocol.
        if file.sha256 is not None and file.num_bytes <= MAX_HTTP_DOWNLOAD_SIZE:
            blob = folder / "blobs" / file.sha256
            if not blob.exists():
                _fetch_blob(listing, name, blob)


def verify(listing: Listing, names: Sequence[str]) -> None:
    """Check the checksums of downloaded files; remove a file that is damaged. Raises ModelError."""
    for name in names:
        sha256 = listing.files[name].sha256
        blob = repo_folder(listing.repo) / "blobs" / str(sha256)
        if sha256 is not None and blob.exists():
            _check_sum(blob, sha256, f"{listing.repo}/{name}")


def cached_files(repo: str, revision: str | None) -> dict[str, Path]:
    """Return the downloaded files of a repository at a revision, by name."""
    folder, name = repo_folder(repo), revision or DEFAULT_REVISION
    ref = folder / "refs" / name
    commit = ref.read_text().strip() if ref.is_file() else name
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return {}
    found = (path for path in sorted(snapshot.rglob("*")) if path.is_file())
    return {path.relative_to(snapshot).as_posix(): path for path in found}


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _check_space(listing: Listing, names: Sequence[str], folder: Path) -> None:
    missing = 0
    for name in names:
        file = listing.files[name]
        blob = folder / "blobs" / str(file.sha256)
        if file.sha256 is None or not blob.exists():
            partial = blob.with_name(blob.name + PARTIAL)
            missing += file.num_bytes - (partial.stat().st_size if partial.exists() else 0)
    place = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if missing > 0 and missing + RESERVE_BYTES > free:
        raise ModelError(
            f"{listing.repo} needs {in_units(missing)} more of disk space, but {place} has"
            f" {in_units(free)} free. Remove models (`quire list`, `quire rm NAME`), or set HF_HOME"
            " to a directory on a larger disk."
        )


def _fetch_blob(listing: Listing, name: str, blob: Path) -> None:
    """Download one file, from where an earlier download ended, and check it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    file, shown = listing.files[name], f"{listing.repo}/{name}"
    partial = blob.with_name(blob.name + PARTIAL)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _locked(partial) as output:
        if blob.exists():  # another process has downloaded it in the meantime
            return
        start = output.seek(0, 2)
        if start > file.num_bytes:
            start = output.truncate(output.seek(0))
        if start:
            logger.info("continuing the download of %s at %s", shown, in_units(start))
        try:
            http_get(
                hf_hub_url(listing.repo, name, revision=listing.commit),
                output,
                resume_size=start,
                headers=build_hf_headers(),
                expected_size=file.num_bytes,
                displayed_filename=name,
            )
        except _network_errors() as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ModelError(
                f"the download of {shown} broke off: {reason.rstrip('.')}. Run the same command"
                f" again; it continues at {in_units(output.tell())}."
            ) from error
        output.flush()
        _check_sum(partial, str(file.sha256), shown)
        partial.rename(blob)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for one process at a time. An interrupted download stays."""
    with path.open("ab"):
        pass
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _check_sum(path: Path, sha256: str, shown: str) -> None:
    """Raise ModelError and remove the file if its checksum is another."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise ModelError(
            f"{shown} does not have its checksum: sha256 is {found}, the hub announces {sha256}."
            " The damaged file was removed; download it again."
        )


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a hub that fails or cannot be reached, and of invalid names. Versions of
    huggingface_hub use different HTTP libraries, so the base class is that of its own error."""
    from huggingface_hub.errors import HfHubHTTPError

    bases = [each for each in HfHubHTTPError.__bases__ if issubclass(each, Exception)]
    return (*bases, OSError, ValueError)


def _unknown(repo: str) -> str:
    """Return the message for a name that the hub does not know, with similar names."""
    near = _similar(repo)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"{repo!r} is not a directory, and the Hugging Face hub has no such model, or it is"
        f" private.{hint} For a private model set HF_TOKEN."
    )


def _similar(repo: str) -> list[str]:
    """Return similar names of local models and of the hub's models, most similar first."""
    from huggingface_hub import HfApi

    names = [each.name for each in local_models()]
    owner, _, model = repo.rpartition("/")
    try:  # a mistake in the owner's name, or in the model's
        names += [each.id for each in HfApi().list_models(search=model, limit=MAX_SEARCHED)]
        if owner:
            names += [each.id for each in HfApi().list_models(author=owner, limit=MAX_SEARCHED)]
    except Exception as error:  # suggestions are optional, whatever the library raises
        logger.debug("no suggestions for %s: %s", repo, error)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(repo.lower(), lower, n=MAX_SUGGESTIONS, cutoff=0.5)
    return [lower[name] for name in near]


def _page(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"
