"""Which of several shipped architectures of equal shapes a file has: by what else it says of how its denoiser predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.families import MARKED_ARCHITECTURES, family_of_architecture
from sdflow.families.shared.few_steps import of_this_name
from sdflow.sources.architectures import architecture_config, prediction_of

Said = tuple[str, str]
"""How the denoiser predicts, as a scheduler's config calls it, and what in the file says so."""

# https://github.com/Stability-AI/ModelSpec
_SPECIFIED = "modelspec.prediction_type"
_SPECIFIED_ARCHITECTURE = "modelspec.architecture"
_PREDICTION_OF = {"stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction"}
# Tensors without a use but to say how the model predicts, in the order in which ComfyUI's supported_models.py looks for them.
_MARKS = {"edm_mean": "edm", "edm_vpred.sigma_max": "edm", "v_pred": "v_prediction"}
_ZERO_SNR = "ztsnr"
"""The tensor that says, beside `v_pred`, that the last step of training is noise alone."""
_WITH_ZERO_SNR = " with zero terminal SNR"
# Steps of training of 2.0 base and of 2.1, by which diffusers' convert_from_ckpt.py knows them. Others say nothing.
_STEPS = {875000: "epsilon", 110000: "v_prediction"}


def what_it_says(names: Iterable[str], metadata: Mapping[str, str]) -> list[Said]:
    """What a file's metadata, and tensors that are there for that alone, say of how the denoiser predicts: each statement."""
    found: list[Said] = []
    if (written := metadata.get(_SPECIFIED)) is not None:
        prediction = "v_prediction" if written in ("v", "v-prediction") else written
        found.append((prediction, f"its {_SPECIFIED} is {written}"))
    if (written := metadata.get(_SPECIFIED_ARCHITECTURE, "")) in _PREDICTION_OF:
        found.append((_PREDICTION_OF[written], f"its {_SPECIFIED_ARCHITECTURE} is {written}"))
    names = frozenset(names)
    if (mark := next((mark for mark in _MARKS if mark in names), None)) is not None:
        both = mark == "v_pred" and _ZERO_SNR in names
        why = f"it has tensors {mark} and {_ZERO_SNR}" if both else f"it has a tensor {mark}"
        found.append((_MARKS[mark] + (_WITH_ZERO_SNR if both else ""), why))
    return found


def what_the_step_says(step: int | None) -> list[Said]:
    """What the number of steps that a model of 2.x was trained for says. Of no use for other families."""
    return [(_STEPS[step], f"its global_step is {step}")] if step in _STEPS else []


def choose(path: Path, fitting: Sequence[str], said: Sequence[Said], wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """One of the architectures that a file's shapes fit, and what the user should hear of the choice.

    said: what the file says of how it predicts; where it says nothing, the first is taken. wanted: what the user wrote.
    Raises CheckpointError where it is none of them, and where the file says that it predicts in another way, or contradicts
    itself.
    """
    predicts = {name: _prediction(name) for name in fitting}
    if wanted is not None and wanted not in fitting:
        raise CheckpointError(
            f"has the shapes of {' and of '.join(_unmarked(fitting))}, not of {wanted}",
            where=str(path),
            remedy=f"Write {' or '.join(f'{path.name}#{name}' for name in fitting)}.",
        )
    if wanted is not None:
        odd = " and ".join(why for prediction, why in said if not _agree(prediction, predicts[wanted]))
        return wanted, (f"{path.name} is taken for {wanted}, although {odd}.",) if odd else ()
    named = of_this_name(fitting, path.name)
    if said:
        _require_one_word(path, named, said)
        prediction, why = max(said, key=lambda each: each[0].endswith(_WITH_ZERO_SNR))
        agreed = [name for name in named if predicts[name] == prediction]
        if not agreed:
            raise CheckpointError(
                f"{why}, and {named[0]}, whose shapes it has, predicts {predicts[named[0]]}",
                where=str(path),
                remedy="Take it as a diffusers folder, whose scheduler says how it predicts. "
                f"{path.name}#{named[0]} takes it as it is.",
            )
        plain = len(_unmarked(named)) == 1 and agreed[0] not in MARKED_ARCHITECTURES
        return agreed[0], () if plain else (f"{path.name} is taken for {agreed[0]}: {why}.",)
    fitting = _unmarked(named)
    if len(fitting) == 1:
        return fitting[0], ()
    first, *others = fitting
    instead = " or ".join(f"{path.name}#{name} ({_size(name)} pixels, {predicts[name]})" for name in others)
    note = (
        f"{path.name} does not say whether it is {' or '.join(fitting)}; it is taken for {first} ({_size(first)} pixels, "
        f"{predicts[first]}). Else write {instead}."
    )
    return first, (note,)


def _prediction(architecture: str) -> str:
    """What the denoiser of an architecture predicts."""
    scheduler = architecture_config(architecture, "scheduler")
    return prediction_of(architecture) + (_WITH_ZERO_SNR if scheduler.get("rescale_betas_zero_snr") else "")


def _agree(one: str, other: str) -> bool:
    """Whether both predict the same. Metadata have no word for zero terminal SNR."""
    return one.removesuffix(_WITH_ZERO_SNR) == other.removesuffix(_WITH_ZERO_SNR)


def _require_one_word(path: Path, fitting: Sequence[str], said: Sequence[Said]) -> None:
    """Raises CheckpointError where one part of a file contradicts another: programs differ in which one they believe."""
    if all(_agree(prediction, said[0][0]) for prediction, _ in said):
        return
    ways = [f"{path.name}#{name} ({_prediction(name)})" for name in fitting]
    raise CheckpointError(
        f"contradicts itself: {', and '.join(why for _, why in said)}",
        where=str(path),
        remedy=f"Say in `model` which is right: {' or '.join(ways)}. ComfyUI goes by the tensor.",
    )


def _unmarked(architectures: Iterable[str]) -> list[str]:
    return [name for name in architectures if name not in MARKED_ARCHITECTURES]


def _size(architecture: str) -> int:
    """Height and width, in pixels, of the images that it was made for."""
    family = family_of_architecture(architecture)
    parts = [part for part in family.parts if not part.optional]
    return family.latents({part.name: architecture_config(architecture, part.component) for part in parts}).image_size
