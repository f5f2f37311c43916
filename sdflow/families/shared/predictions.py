"""What files in the original layouts say of how their denoiser predicts: noise, velocity, or as EDM does.

Nothing in the shapes of a denoiser tells it: metadata do, tensors that are there for that alone, and the number of training
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
WITH_ZERO_SNR = " with zero terminal SNR"
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
        found.append((_MARKS[mark] + (WITH_ZERO_SNR if both else ""), why))
    return found


def what_the_step_says(step: int | None) -> list[Said]:
    """What the number of steps that a model of 2.x was trained for says. Of no use for other families."""
    return [(_STEPS[step], f"its global_step is {step}")] if step in _STEPS else []
