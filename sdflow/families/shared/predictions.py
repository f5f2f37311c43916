"""Detect from a file in an original layout what its denoiser predicts: noise, velocity, or EDM's target.

The shapes of a denoiser do not reveal it; metadata, dedicated tensors and the number of training steps do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Said = tuple[str, str]
"""The prediction type, as in scheduler configs, and the evidence for it in the file."""

# https://github.com/Stability-AI/ModelSpec
_SPECIFIED = "modelspec.prediction_type"
_SPECIFIED_ARCHITECTURE = "modelspec.architecture"
_PREDICTION_OF = {"stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction"}
# Tensors that only indicate how the model predicts, in the order of ComfyUI's supported_models.py.
_MARKS = {"edm_mean": "edm", "edm_vpred.sigma_max": "edm", "v_pred": "v_prediction"}
_ZERO_SNR = "ztsnr"
"""Tensor that, together with `v_pred`, indicates that the last training step is pure noise."""
WITH_ZERO_SNR = " with zero terminal SNR"
# Training steps of 2.0 base and 2.1, by which diffusers' convert_from_ckpt.py recognizes them. Other numbers are
# ignored.
_STEPS = {875000: "epsilon", 110000: "v_prediction"}


def what_it_says(names: Iterable[str], metadata: Mapping[str, str]) -> list[Said]:
    """Return each statement of a file's metadata and dedicated tensors about what its denoiser predicts."""
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
    """Return what a 2.x model's number of training steps indicates. Not for other families."""
    return [(_STEPS[step], f"its global_step is {step}")] if step in _STEPS else []
