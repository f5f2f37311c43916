"""Check and read a call's reference images."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.families.shared.references import MOST_REFERENCES, REFERENCES, with_references
from sdflow.machine.memory import available_bytes
from sdflow.runtime.denoiser.start import ALWAYS_THERE
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch


def most_references(family: Family, submodels: Container[str]) -> int:
    """Return the maximum number of reference images per call for a pipeline with these submodels."""
    return MOST_REFERENCES if family.references is not None and family.encoder in submodels else 0


def require_references(family: Family, submodels: Container[str], count: int, where: str = REFERENCES) -> None:
    """Raise UsageError if a pipeline with these submodels takes no reference images, or for too many. where: the
    argument's name for the user."""
    if not count:
        return
    if family.references is None:
        raise UsageError(f"{family.title} takes no reference images", where=where, remedy="Remove them.")
    if family.encoder not in submodels:
        raise UsageError(
            f"the pipeline has no {family.encoder}, so it takes no reference images",
            where=where,
            remedy=f"Rebuild it from a workflow with passes for the {family.encoder}.",
        )
    if count > MOST_REFERENCES:
        raise UsageError(f"there are {count} reference images", where=where, remedy=f"Use at most {MOST_REFERENCES}.")


def read_references(images: Any, family: Family, submodels: Container[str], multiple: int) -> list[torch.Tensor]:
    """Return the pixels of one image or several, each (1, 3, height, width) in [-1, 1]; empty for None. multiple:
    height and width are multiples of it. Raises UsageError as `require_references`, and for unsupported images."""
    listed = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
    require_references(family, submodels, len(listed))
    return [] if family.references is None else [family.references.pixels(each, multiple) for each in listed]


def require_reference_room(denoiser: Submodel, shape: Sequence[int], rows: int, tokens: int) -> None:
    """Raise UsageError if a step with this many reference tokens is estimated to exceed free memory. shape: of the
    latents.
    rows: batch size of the denoiser."""
    if not tokens:
        return
    device = denoiser.place.device
    size = with_references((shape[2], shape[3]), tokens)
    needed = rows * row_bytes(denoiser.part.model, denoiser.config, size, device)
    if needed > ALWAYS_THERE and needed > (free := available_bytes(device)):
        raise UsageError(
            f"these reference images need about {spell_bytes(needed)} per step, but only {spell_bytes(free)} are free",
            where=REFERENCES,
            remedy="Use fewer or smaller reference images, or a smaller image.",
        )
