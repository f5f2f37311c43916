"""What a checkpoint is: its submodels, each with an identity for the cache key and the data to load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sdflow.digest import digest_file, digest_json
from sdflow.errors import CheckpointError
from sdflow.picture_sizes import granularity, vae_scale

# The folder of a diffusers pipeline that each submodel's weights lie in.
COMPONENT_OF = {
    "text_encoder": "text_encoder",
    "unet": "unet",
    "vae_encoder": "vae",
    "vae_decoder": "vae",
    "safety_checker": "safety_checker",
}
CLASS_OF = {
    "text_encoder": "CLIPTextModel",
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "safety_checker": "StableDiffusionSafetyChecker",
}
COMPANIONS = ("tokenizer", "scheduler", "feature_extractor")

# Entries of a config.json that say who wrote it, not what the model is.
_ORIGIN_KEYS = frozenset({"_diffusers_version", "_name_or_path", "transformers_version"})


class CheckpointNotLocal(CheckpointError):
    """The checkpoint or LoRA is on the hub, is not in the local hub cache, and downloading was not asked for."""


class MissingFile(CheckpointError):
    """A checkpoint folder lacks a file that it needs."""


class FileDigests(Protocol):
    """Digests of files, remembered as long as the file's size, time and inode stay the same."""

    def digest(self, path: Path) -> str:
        """SHA-256 of the file's content."""

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`, remembered under the name `what`."""


class PlainDigests:
    """FileDigests that remembers nothing."""

    def digest(self, path: Path) -> str:
        """SHA-256 of the file's content."""
        return digest_file(path)

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`."""
        return compute(path)


@dataclass(frozen=True)
class SubmodelCheckpoint:
    """One submodel of a checkpoint.

    identity: JSON for the cache key: digests of contents, never a path or a name. vae_encoder and vae_decoder are one
        module, so their identities are equal: whoever makes a key adds the submodel's name.
    load: JSON for `load_module`, valid in any process of this machine; holds paths, and belongs in no key.
    """

    identity: Mapping[str, Any]
    load: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    reference: as the workflow writes it.
    provenance: JSON for the pipeline's manifest: kind, where it came from, digests of the files.
    submodels: by submodel name; no safety_checker when the checkpoint has none.
    companions: the folders "tokenizer", "scheduler" and, with a safety checker, "feature_extractor".
    facts: JSON: image_size (pixels), granularity (height and width are multiples of so many pixels), latent_channels,
        vae_scale_factor, scaling_factor, cross_attention_dim, scheduler (class name), requires_safety_checker.
    notes: choices that the user should hear of, one sentence each.
    """

    reference: str
    provenance: Mapping[str, Any]
    submodels: Mapping[str, SubmodelCheckpoint]
    companions: Mapping[str, Path]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config.json without the entries that name the program or the folder it came from."""
    return digest_json({key: value for key, value in config.items() if key not in _ORIGIN_KEYS})


def file_stamp(path: Path) -> dict[str, Any]:
    """JSON that tells whether a file is still the one that was opened: path, size in bytes, mtime in nanoseconds."""
    stat = path.stat()
    return {"path": str(path.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def check_stamps(stamps: Iterable[Mapping[str, Any]]) -> None:
    """Raise CheckpointError when a file is no longer the one that was opened (its digest is in a cache key)."""
    for stamp in stamps:
        path = Path(stamp["path"])
        try:
            same = file_stamp(path) == dict(stamp)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if not same:
            raise CheckpointError(
                "has changed since the build was planned", where=str(path), remedy="Start the command again."
            )


def side_by_side(work: Sequence[Callable[[], str]]) -> list[str]:
    """The results of functions that read and hash, in order, each in a thread: hashing lets the others run."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda each: each(), work))


def pipeline_facts(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of a checkpoint from the configs of "unet", "vae" and "scheduler".

    Raises KeyError or TypeError for a config that lacks one.
    """
    unet, vae = configs["unet"], configs["vae"]
    vae_scale_factor = vae_scale(vae)
    return {
        "image_size": unet["sample_size"] * vae_scale_factor,
        "granularity": granularity(unet, vae),
        "latent_channels": vae["latent_channels"],
        "vae_scale_factor": vae_scale_factor,
        "scaling_factor": vae.get("scaling_factor", 0.18215),
        "cross_attention_dim": unet["cross_attention_dim"],
        "scheduler": configs["scheduler"]["_class_name"],
    }


def listing(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
