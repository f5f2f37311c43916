"""An opened checkpoint: its submodels, each with an identity for the cache key and the data to load it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sdflow.digest import digest_file, digest_json
from sdflow.disk.file_stamp import Stamp
from sdflow.errors import CheckpointError, UsageError
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.part import Part
from sdflow.families.shared.sampler_names import known_scheduler
from sdflow.families.shared.schedulers import renamed

# Entries of a config.json that record its origin, not the model.
ORIGIN_KEYS = frozenset({"_diffusers_version", "_name_or_path", "transformers_version"})


class CheckpointNotLocal(CheckpointError):
    """The checkpoint or LoRA is on the hub, but not in the local hub cache, and downloading was not requested."""


class MissingFile(CheckpointError):
    """A checkpoint folder lacks a file that it needs."""


class FileDigests(Protocol):
    """Digests of files, cached while a file's size, time and inode stay the same."""

    def digest(self, path: Path) -> str:
        """SHA-256 of the file's content."""

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`, cached under the name `what`."""


class PlainDigests:
    """FileDigests without a cache."""

    def digest(self, path: Path) -> str:
        """SHA-256 of the file's content."""
        return digest_file(path)

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`."""
        return compute(path)


@dataclass(frozen=True)
class Access:
    """Permissions for opening. download: query the hub; otherwise only its local cache is searched. allow_pickle: read
    pickles, with weights_only=True."""

    digests: FileDigests
    download: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class SubmodelCheckpoint:
    """One submodel of a checkpoint.

    identity: JSON for the cache key: digests of content, never a path or name. vae_encoder and vae_decoder are one
        module with equal identities, so keys must include the submodel's name.
    load: JSON for `load_module`, valid in any process on this machine; contains paths and the family, so it must not be
        part of a key. adapters: for an `adapted` part, how to load the parameters in each adapter's file.
    """

    identity: Mapping[str, Any]
    load: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    reference: as in the workflow.
    provenance: JSON for the pipeline's manifest: kind, origin, digests of the files.
    submodels: by name, without the family's optional ones if the checkpoint lacks them.
    companions: tokenizers, scheduler, feature extractor -> folder.
    companion_stamps: of the files in these folders, taken before they were read.
    facts: JSON: image_size (pixels), granularity (divisor of height and width in pixels), latent_channels,
        vae_scale_factor, scaling_factor, scheduler (class name), requires_safety_checker.
    index: its model_index.json; for a single file, its architecture's.
    options: its entries that the family's pipelines read (`Family.options`).
    notes: choices to report to the user, one sentence each.
    said: settings for generating that its configs lack (`sdflow.manifest.form.Said`).
    """

    family: Family
    reference: str
    provenance: Mapping[str, Any]
    submodels: Mapping[str, SubmodelCheckpoint]
    companions: Mapping[str, Path]
    facts: Mapping[str, Any]
    index: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    companion_stamps: tuple[Stamp, ...] = ()
    said: Mapping[str, Any] = field(default_factory=dict)

    def stamps(self, submodels: Collection[str] | None = None) -> list[Stamp]:
        """Stamps of every file read by loading these submodels (None: all) and the companions, taken before reading."""
        loads = [source.load for name, source in self.submodels.items() if submodels is None or name in submodels]
        return [*self.companion_stamps, *(stamp for load in loads for stamp in stamps_of(load))]

    def defaults(self) -> dict[Task, Defaults]:
        """The defaults of its pipeline's calls, for each task."""
        configs = {name: submodel.load["config"] for name, submodel in self.submodels.items()}
        return self.family.defaults_of(configs, self._scheduler(), self.said)

    def changed_companions(self) -> dict[str, dict[str, Any]]:
        """Companion files to change, as companion/file -> JSON: the scheduler's, if another one is set."""
        name = self.said.get("scheduler")
        file = self.family.companions["scheduler"].file
        if name is not None:
            found = known_scheduler(name, "generate.scheduler", self.family.noising.schedulers)
            if found != name:  # keys and manifests need one name per scheduler
                raise UsageError(f"{name} does not fit this model", where="generate.scheduler", remedy=f"Use {found}.")
        return {} if name is None else {f"scheduler/{file}": renamed(self._scheduler(), name)}

    def _scheduler(self) -> dict[str, Any]:
        file = self.companions["scheduler"] / self.family.companions["scheduler"].file
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return config


def stamps_of(load: Mapping[str, Any]) -> list[Stamp]:
    """Stamps of every file read by loading a submodel. load: `SubmodelCheckpoint.load`."""
    return [stamp for each in (load, *load.get("adapters", ())) for stamp in each.get("files", ())]


def files_of(load: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """The files of a load, each with a prefix to add to its tensors' names: "", or the half's name for a file with one
    half of a model. load: one that has files."""
    files = [Path(stamp["path"]) for stamp in load["files"]]
    return list(zip(files, load.get("begins") or [""] * len(files), strict=True))


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config.json without entries that record its origin."""
    return digest_json({key: value for key, value in config.items() if key not in ORIGIN_KEYS})


def side_by_side(work: Sequence[Callable[[], str]]) -> list[str]:
    """The results of functions that read and hash, in order, each run in a thread: hashing releases the GIL."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda each: each(), work))


def pipeline_facts(family: Family, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of a checkpoint, from the configs of its components and of "scheduler".

    Raises KeyError or TypeError for an incomplete config, CheckpointError for a VAE that shifts its latents, and for a
    denoiser whose additional channels are not a mask and a masked image.
    """
    for name, config in configs.items():
        if config.get("latents_mean") is not None:
            raise CheckpointError(
                f"the {name} shifts its latents by latents_mean and latents_std; sdflow only scales them",
                where=f"{name}/config.json",
                remedy="Use a checkpoint or a VAE with only a scaling_factor.",
            )
    parts = {
        part.name: configs[part.component]
        for part in family.parts
        if not part.optional and (part.component in configs or part.name not in family.text)
    }
    latents, channels = family.latents(parts), family.input_channels(parts)
    if family.task(parts) != "inpaint" and channels != latents.channels:
        raise CheckpointError(
            f"the denoiser takes {channels} channels, but latents have {latents.channels}",
            where=f"{family.denoiser}/config.json",
            remedy=f"Supported are {latents.channels} channels, and {2 * latents.channels + 1} for inpainting.",
        )
    return {
        "image_size": latents.image_size,
        "granularity": latents.granularity,
        "latent_channels": latents.channels,
        "vae_scale_factor": latents.scale,
        "scaling_factor": latents.factor,
        "scheduler": configs["scheduler"]["_class_name"],
    }


def read_options(family: Family, index: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of model_index.json that the family's pipelines read, with diffusers' defaults for missing ones."""
    return {name: index.get(name, default) for name, default in family.options.items()}


def submodels_of(
    family: Family,
    components: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    build: Callable[[Part, Mapping[str, Any]], SubmodelCheckpoint],
) -> dict[str, SubmodelCheckpoint]:
    """The submodels whose components exist. components: component -> config.json. options: of model_index.json, as the
    family's pipelines read them. build: called with a part and its config, including entries that the family sets."""
    return {
        part.name: build(
            part, {**components[part.component], **part.config, **{name: options[name] for name in part.options}}
        )
        for part in family.parts
        if part.component in components
    }


LONGEST_NAME = 200
"""Maximum characters of a name in a message; names in files have any length."""


def listing(names: Sequence[str], limit: int = 5) -> str:
    """The first names, shortened, and the number of others."""
    rest = len(names) - limit
    shown = (name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:limit])
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
