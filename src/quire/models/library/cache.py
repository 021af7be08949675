"""The downloaded models of the hub's cache: list them, and remove them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError, ModelNotFound
from quire.models.library.gguf_choice import candidates_of
from quire.models.library.hub import PARTIAL
from quire.models.library.local import local_models

HUB = "Hugging Face"
SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine. name: as MODEL of a command. path: directory or GGUF file."""

    name: str
    program: str
    path: Path
    num_bytes: int


def stored_models() -> list[StoredModel]:
    """List the models that can be served without a download, by program and name."""
    others = [StoredModel(m.name, m.program, m.path, m.num_bytes) for m in local_models()]
    return [*sorted(_of_hub(), key=lambda model: model.name), *others]


def remove_model(name: str) -> int:
    """Remove a downloaded model, and return the bytes that this freed.

    Raises ModelNotFound if the hub's cache does not have it, and ModelError for a model of another
    program, which that program removes."""
    repo, _, tag = name.partition(":")
    known = {each.name.lower(): each for each in stored_models()}
    found = [each for key, each in known.items() if name.lower() in (key, key.partition(":")[0])]
    if not found:
        partial = [each for each in _repos() if each.repo_id == repo and not tag]
        if not partial:
            raise ModelNotFound(f"there is no downloaded model {name!r}; `quire list` lists them.")
    if foreign := [each for each in found if each.program != HUB]:
        raise ModelError(
            f"{name} belongs to {foreign[0].program}, which manages its file {foreign[0].path};"
            " remove it there."
        )
    folder = next(each for each in _repos() if each.repo_id.lower() == repo.lower())
    return _remove_files(folder, tag) if tag else _remove_repo(folder)


def _of_hub() -> Iterator[StoredModel]:
    for repo in _repos():
        for revision in repo.revisions:
            names = {
                each.file_path.relative_to(revision.snapshot_path).as_posix(): each
                for each in revision.files
            }
            for each in candidates_of({name: file.size_on_disk for name, file in names.items()}):
                path = names[each.files[0]].file_path
                yield StoredModel(f"{repo.repo_id}:{each.label}", HUB, path, each.num_bytes)
            if any(name.endswith(SAFETENSORS) for name in names):
                size = sum(file.size_on_disk for name, file in names.items() if ".gguf" not in name)
                yield StoredModel(repo.repo_id, HUB, revision.snapshot_path, size)


def _repos() -> list[Any]:
    """Return the repositories of models in the hub's cache, as huggingface_hub describes them."""
    from huggingface_hub.errors import CacheNotFound

    try:
        return [each for each in _scan().repos if each.repo_type == "model"]
    except CacheNotFound:
        return []


def _scan() -> Any:
    from huggingface_hub import constants, scan_cache_dir

    return scan_cache_dir(constants.HF_HUB_CACHE)


def _remove_repo(repo: Any) -> int:
    partial = [*(repo.repo_path / "blobs").glob(f"*{PARTIAL}")]
    num_bytes: int = sum(path.stat().st_size for path in partial)
    for path in partial:
        path.unlink()
    hashes = [revision.commit_hash for revision in repo.revisions]
    strategy = _scan().delete_revisions(*hashes)
    strategy.execute()
    return num_bytes + int(strategy.expected_freed_size)


def _remove_files(repo: Any, tag: str) -> int:
    """Remove the files of one quantisation; without other weights, the whole repository."""
    freed = 0
    for revision in repo.revisions:
        files = {
            each.file_path.relative_to(revision.snapshot_path).as_posix(): each
            for each in revision.files
        }
        candidates = candidates_of({name: file.size_on_disk for name, file in files.items()})
        doomed = [each for each in candidates if each.label.lower() == tag.lower()]
        has_others = any(name.endswith(SAFETENSORS) for name in files)
        if len(candidates) == len(doomed) and not has_others:
            return _remove_repo(repo)
        for name in (name for each in doomed for name in each.files):
            freed += int(files[name].size_on_disk)
            files[name].file_path.unlink(missing_ok=True)
            files[name].blob_path.unlink(missing_ok=True)
    return freed
