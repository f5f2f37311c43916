"""Checkpoints and files on the Hugging Face hub, pinned to a commit, via huggingface_hub and its local cache.

The client honours HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from sdflow.disk.atomic_write import write_whole
from sdflow.errors import CheckpointError
from sdflow.families import FAMILIES
from sdflow.models.base import Model
from sdflow.sources.checkpoint import Access, Checkpoint, CheckpointNotLocal, MissingFile, listing
from sdflow.sources.folder import open_folder
from sdflow.sources.licence import CARD
from sdflow.sources.reference import PICKLE_SUFFIXES, HubReference
from sdflow.sources.weight_files import ADAPTER_CONFIG, choose_weights, is_shard


class HubUnreachable(CheckpointError):
    """The connection failed or broke off, which says nothing about the repository."""


_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIBING = ("model_index.json", "config.json", "scheduler_config.json")
_TEXT_SUFFIXES = (".json", ".txt", ".model")


def open_hub(
    hub: HubReference, reference: str, access: Access, left_out: Collection[str] = (), replaced: Collection[str] = ()
) -> Checkpoint:
    """Open a checkpoint on the hub. With `download`, resolves the revision's commit and fetches missing files, except
    those of left-out components and the weights of replaced ones.

    Raises CheckpointNotLocal if it is not in the local cache and must not be downloaded, CheckpointError if the
    repository or revision does not exist or is inaccessible, or the hub is unreachable.
    """

    def opened(snapshot: Path, origin: Mapping[str, Any]) -> Checkpoint:
        return open_folder(snapshot, reference, access, origin=origin, left_out=left_out, replaced=replaced)

    wanted = partial(needed_files, left_out=left_out, replaced=replaced)
    return open_snapshot(hub, opened, wanted, download=access.download)


class Noted(Protocol):
    """An opened object with notes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""


Opened = TypeVar("Opened", bound=Noted)


def open_snapshot(
    hub: HubReference,
    opened: Callable[[Path, Mapping[str, Any]], Opened],
    wanted: Callable[[Collection[str]], list[str]],
    *,
    download: bool,
) -> Opened:
    """Return `opened`'s result for the snapshot's folder and its origin, JSON for the provenance.

    wanted: selects the files to fetch from a repository's names. Raises as `open_hub` does.
    """

    def with_origin(snapshot: Path) -> Opened:
        origin = {"kind": "hub", "repository": hub.repository, "revision": hub.revision, "commit": snapshot.name}
        return opened(snapshot, origin)

    download = download and not _offline()
    if not download or _COMMIT.fullmatch(hub.revision):
        local = _local_snapshot(hub)
        if local is not None:
            found = None
            with suppress(MissingFile):
                found = with_origin(local)
            # Fallbacks (variants, pickles) may only mean that another program fetched part of the repository.
            if found is not None and (not download or len(found.notes) == 0):
                return found
    if not download:
        raise _not_local(hub)
    return with_origin(_fetch(hub, wanted))


def hub_weights(hub: HubReference, *, download: bool) -> tuple[Path, dict[str, Any]]:
    """The weight file that a reference names, and its provenance as JSON. Raises as `open_hub` does."""
    path = hub_file(hub, hub.file, download=download)
    commit = path.parents[len(PurePosixPath(hub.file).parts) - 1].name
    origin = {"kind": "hub", "repository": hub.repository, "revision": hub.revision, "commit": commit, "file": hub.file}
    return path, origin


def hub_file(hub: HubReference, weight_name: str | None, *, download: bool) -> Path:
    """One .safetensors file of a repository: the named one, or the only one at its top, with PEFT's configuration next
    to it.

    Raises as `open_hub` does, and if there are several candidates.
    """

    def wanted(names: Collection[str]) -> list[str]:
        file = choose_file(names, weight_name, f"hf:{hub.repository}")
        config = PurePosixPath(file).with_name(ADAPTER_CONFIG).as_posix()
        return [file, config] if config in names else [file]

    download = download and not _offline()
    if not download or _COMMIT.fullmatch(hub.revision):
        local = _local_snapshot(hub)
        if local is not None and weight_name is not None and (local / weight_name).is_file():
            return local / weight_name
        if not download:
            names = [] if local is None else [path.relative_to(local).as_posix() for path in local.rglob("*.*")]
            there = any(name.lower().endswith(".safetensors") for name in names)
            if local is None or weight_name is not None or not there:
                raise _not_local(hub)
            return local / wanted(names)[0]
    fetched: list[str] = []

    def remembered(names: Collection[str]) -> list[str]:
        fetched.extend(wanted(names))
        return fetched

    snapshot = _fetch(hub, remembered)
    return snapshot / fetched[0]


class _NoIndex(Exception):
    """Nothing to fetch describes a pipeline."""


@dataclass(frozen=True)
class Repository:
    """The description of a hub repository.

    configurations: a folder with the repository's model_index.json and its components' config.json, without weights;
    None without a model_index.json. files: all files of the repository.
    """

    configurations: Path | None
    files: tuple[str, ...]


def describe_repository(hub: HubReference) -> Repository | None:
    """Describe a repository from some kilobytes of it; None if the network is off (HF_HUB_OFFLINE).

    Raises as `open_hub` does; HubUnreachable if the hub does not answer.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if _offline():
        return None
    found: list[str] = []

    def wanted(names: Collection[str]) -> list[str]:
        found.extend(sorted(names))
        if "model_index.json" not in found:
            raise _NoIndex
        return [name for name in found if name.count("/") <= 1 and name.rpartition("/")[2] in _DESCRIBING]

    shown = not are_progress_bars_disabled()
    disable_progress_bars()  # the files are tiny
    try:
        snapshot = _fetch(hub, wanted)
    except _NoIndex:
        return Repository(None, tuple(found))
    finally:
        if shown:
            enable_progress_bars()
    return Repository(snapshot, tuple(found))


def choose_file(names: Collection[str], weight_name: str | None, where: str) -> str:
    """The named file, or the only .safetensors file at the top."""
    remedy = "Choose one: `weight_name` in a workflow, `--lora ...#NAME` for `sdflow bake`."
    found = sorted(name for name in names if name.lower().endswith(".safetensors") and "/" not in name)
    if weight_name is not None:
        if weight_name not in names:
            raise CheckpointError(
                f"holds no file {weight_name}", where=where, remedy=f"It holds {', '.join(found) or 'no .safetensors'}."
            )
        return weight_name
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"holds several LoRAs: {', '.join(found)}", where=where, remedy=remedy)
    below = sorted(name for name in names if name.lower().endswith(".safetensors"))
    if below:  # several adapters that PEFT saved together, or one per part of a model
        folders = sorted({name.rpartition("/")[0] for name in below})
        raise CheckpointError(
            f"holds LoRAs in {len(folders)} of its folders: {listing(folders)}",
            where=where,
            remedy=f"Name one by its file: {below[0]}, as `weight_name` in a workflow or after # in `--lora`.",
        )
    if pickles := sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES) and "/" not in name):
        raise CheckpointError(
            f"holds no .safetensors file, but {pickles[0]}: pickled LoRAs are not supported",
            where=where,
            remedy="Save it again as .safetensors.",
        )
    raise CheckpointError("holds no .safetensors file", where=where, remedy=remedy)


def needed_files(names: Collection[str], left_out: Collection[str] = (), replaced: Collection[str] = ()) -> list[str]:
    """The files of a repository that `open_folder` reads, and the model card with its licence: weights only once,
    nothing of left-out components, and only the configuration of replaced ones."""
    wanted = [name for name in names if name in ("model_index.json", CARD)]
    components = {name: parts[0].model for family in FAMILIES.values() for name, parts in family.components.items()}
    for component, model in components.items():
        if component in left_out:
            continue
        files = component_files(names, f"{component}/", model)
        wanted += [name for name in files if component not in replaced or name == f"{component}/config.json"]
    for companion in dict.fromkeys(name for family in FAMILIES.values() for name in family.companions):
        wanted += [name for name in names if name.startswith(f"{companion}/") and name.endswith(_TEXT_SUFFIXES)]
    return sorted(wanted)


def component_files(names: Collection[str], folder: str, model: Model) -> list[str]:
    """The files of a component that `open_component` reads. folder: "vae/"; "" if the repository is the component."""
    inside = {name.removeprefix(folder): name for name in names if name.startswith(folder)}
    wanted = [name for short, name in inside.items() if short == "config.json"]
    chosen = choose_weights(inside, model)
    if chosen is not None:
        wanted.append(inside[chosen[0]])
        if chosen[0].endswith(".json"):
            wanted += [name for short, name in inside.items() if is_shard(short, *chosen)]
    return wanted


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def commit_of(path: Path) -> str | None:
    """The commit of a file in the local hub cache; None for any other file."""
    from huggingface_hub import constants

    with suppress(ValueError):
        within = path.relative_to(constants.HF_HUB_CACHE).parts
        if within[1:2] == ("snapshots",) and _COMMIT.fullmatch(within[2]):
            return within[2]
    return None


def _repository_folder(hub: HubReference) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{hub.repository.replace('/', '--')}"


def _local_snapshot(hub: HubReference) -> Path | None:
    """The revision's snapshot in the local cache, complete or not, without using the network."""
    folder = _repository_folder(hub)
    commit = hub.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / commit).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _not_local(hub: HubReference) -> CheckpointNotLocal:
    return CheckpointNotLocal(
        "is missing from the local hub cache, or incomplete there",
        where=f"hf:{hub.repository}@{hub.revision}",
        remedy="`sdflow run` downloads it, unless HF_HUB_OFFLINE=1 is set.",
    )


def _fetch(hub: HubReference, wanted: Callable[[Collection[str]], list[str]]) -> Path:
    """The snapshot folder, after fetching missing files."""
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(hub):
        info = HfApi().model_info(hub.repository, revision=hub.revision)
        names = wanted([sibling.rfilename for sibling in info.siblings or []])
        if not info.sha or not _COMMIT.fullmatch(info.sha):
            raise CheckpointError("the hub named no commit", where=f"hf:{hub.repository}@{hub.revision}")
        # Names, not patterns: fnmatch would read brackets as a set.
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in names] or ["model_index.json"]
        snapshot = Path(snapshot_download(hub.repository, revision=info.sha, allow_patterns=patterns))
    if hub.revision != info.sha:
        # Record the revision's commit as huggingface_hub would.
        write_whole(_repository_folder(hub) / "refs" / hub.revision, info.sha.encode("ascii"))
    return snapshot


@contextmanager
def _hub_errors(hub: HubReference) -> Iterator[None]:
    from huggingface_hub import errors

    where = f"hf:{hub.repository}@{hub.revision}"
    # Its first base is the HTTP library's base class of failures, whichever library the client uses.
    transport = errors.HfHubHTTPError.__bases__[0]
    failures: tuple[type[BaseException], ...] = (transport, errors.HfHubHTTPError, OSError, ValueError)
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            "the repository is gated",
            where=where,
            remedy=f"Accept its terms on the page of {hub.repository}, then `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            "no such repository, or it is private",
            where=where,
            remedy="Check the name; for a private one, `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"the repository has no revision {hub.revision}", where=where, remedy="Name a branch, a tag or a commit."
        ) from error
    except failures as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HubUnreachable(
            f"the hub cannot be reached, or the download failed: {said}",
            where=where,
            remedy="Try again: finished files are kept. HF_HUB_OFFLINE=1 uses only the local cache.",
        ) from error
