"""Choose among shipped architectures of equal shapes by a file's hints about its denoiser's prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.families import MARKED_ARCHITECTURES, family_of_architecture
from sdflow.families.shared.few_steps import of_this_name
from sdflow.families.shared.predictions import WITH_ZERO_SNR, Said
from sdflow.sources.architectures import architecture_config, prediction_of

Spelled = Callable[[str], str]
"""Spells a file with an architecture, as in a workflow."""


def choose(
    path: Path, fitting: Sequence[str], said: Sequence[Said], wanted: str | None, spelled: Spelled | None = None
) -> tuple[str, tuple[str, ...]]:
    """Choose one of the architectures that a file's shapes fit; also returns notes on the choice for the user.

    said: prediction types that the file states; if it states none, the first architecture is chosen. wanted: the user's
    choice. spelled: defaults to `FILE#NAME`.

    Raises CheckpointError if `wanted` is none of them, or if the file states another prediction type or contradicts
    itself.
    """
    spelled = spelled or f"{path.name}#{{}}".format
    predicts = {name: _prediction(name) for name in fitting}
    if wanted is not None and wanted not in fitting:
        raise CheckpointError(
            f"has the shapes of {' and of '.join(_unmarked(fitting))}, not of {wanted}",
            where=str(path),
            remedy=f"Write {' or '.join(map(spelled, fitting))}.",
        )
    if wanted is not None:
        odd = " and ".join(why for prediction, why in said if not _agree(prediction, predicts[wanted]))
        return wanted, (f"{path.name} is taken for {wanted}, although {odd}.",) if odd else ()
    named = of_this_name(fitting, path.name)
    if said:
        _require_one_word(path, named, said, spelled)
        prediction, why = max(said, key=lambda each: each[0].endswith(WITH_ZERO_SNR))
        agreed = [name for name in named if predicts[name] == prediction]
        if not agreed:
            raise CheckpointError(
                f"{why}, but {named[0]}, whose shapes it has, predicts {predicts[named[0]]}",
                where=str(path),
                remedy="Use a diffusers folder, whose scheduler has the prediction type. "
                f"{spelled(named[0])} uses it as it is.",
            )
        plain = len(_unmarked(named)) == 1 and agreed[0] not in MARKED_ARCHITECTURES
        return agreed[0], () if plain else (f"{path.name} is taken for {agreed[0]}: {why}.",)
    fitting = _unmarked(named)
    if len(fitting) == 1:
        return fitting[0], ()
    first, *others = fitting
    instead = " or ".join(f"{spelled(name)} ({_size(name)} pixels, {predicts[name]})" for name in others)
    note = (
        f"{path.name} does not say whether it is {' or '.join(fitting)}; it is used as {first} ({_size(first)} pixels, "
        f"{predicts[first]}). To change that, write {instead}."
    )
    return first, (note,)


def _prediction(architecture: str) -> str:
    """The denoiser's prediction type of an architecture."""
    scheduler = architecture_config(architecture, "scheduler")
    return prediction_of(architecture) + (WITH_ZERO_SNR if scheduler.get("rescale_betas_zero_snr") else "")


def _agree(one: str, other: str) -> bool:
    """Whether both are the same prediction. Metadata cannot express zero terminal SNR."""
    return one.removesuffix(WITH_ZERO_SNR) == other.removesuffix(WITH_ZERO_SNR)


def _require_one_word(path: Path, fitting: Sequence[str], said: Sequence[Said], spelled: Spelled) -> None:
    """Raises CheckpointError if parts of a file contradict each other: programs differ in which one they use."""
    if all(_agree(prediction, said[0][0]) for prediction, _ in said):
        return
    ways = [f"{spelled(name)} ({_prediction(name)})" for name in fitting]
    raise CheckpointError(
        f"contradicts itself: {', and '.join(why for _, why in said)}",
        where=str(path),
        remedy=f"Choose one in `model`: {' or '.join(ways)}. ComfyUI uses the tensor.",
    )


def _unmarked(architectures: Iterable[str]) -> list[str]:
    return [name for name in architectures if name not in MARKED_ARCHITECTURES]


def _size(architecture: str) -> int:
    """The native image size in pixels."""
    family = family_of_architecture(architecture)
    parts = [part for part in family.parts if not part.optional]
    return family.latents({part.name: architecture_config(architecture, part.component) for part in parts}).image_size
