"""The inputs that submodels are compared on, beside those recorded while a picture is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdflow.verify.cases import Case, Cases
from sdflow.verify.selection import Selection

if TYPE_CHECKING:
    import numpy as np


def first_latents(selection: Selection, channels: int) -> np.ndarray:
    """Unit normal latents (1, channels, rows, columns) that every engine starts the picture from."""
    import numpy as np

    shape = (1, channels, selection.rows, selection.columns)
    return np.random.default_rng(selection.seed).standard_normal(shape, dtype=np.float32)


def further_unet_cases(cases: Cases, selection: Selection) -> None:
    """Edge timesteps, at the first latents for the largest and at the last for the others; other shapes."""
    import numpy as np

    first, last = cases.get(0, "inputs"), cases.get(len(cases.cases) - 1, "inputs")
    for timestep in selection.timesteps:
        near = first if timestep > 500 else last
        one = {name: value[-1:] for name, value in near.items()} | {"timestep": np.array([timestep], np.float32)}
        cases.add(Case(f"timestep {timestep:g}", "edge timestep", None, timestep), one)
    random = np.random.default_rng(selection.seed + 1)
    text = first["encoder_hidden_states"]
    for batch, rows, columns in selection.shapes:
        sample = random.standard_normal((batch, first["sample"].shape[1], rows, columns), dtype=np.float32)
        hidden = np.concatenate([text[index % len(text)][None] for index in range(batch)])
        inputs = {"sample": sample, "timestep": np.array([501], np.float32), "encoder_hidden_states": hidden}
        cases.add(Case(f"shape {batch}x{rows}x{columns}", "shape", None, 501), inputs)


def text_cases(pipeline: Any, selection: Selection) -> Cases:
    """Each prompt by itself, and all together as one batch."""
    cases = Cases()
    tokens = [_tokens(pipeline, [prompt]) for prompt in selection.prompts]
    for prompt, ids in zip(selection.prompts, tokens, strict=True):
        shown = prompt if len(prompt) <= 40 else prompt[:37] + "..."
        cases.add(Case(f"prompt {shown!r}", "prompt"), {"input_ids": ids})
    both = [selection.prompts[0], ""]
    cases.add(Case("a batch of 2", "shape"), {"input_ids": _tokens(pipeline, both)})
    return cases


def _tokens(pipeline: Any, prompts: Sequence[str]) -> np.ndarray:
    import numpy as np

    tokenizer = pipeline.tokenizer
    options = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    ids: np.ndarray = tokenizer(list(prompts), return_tensors="np", **options).input_ids.astype(np.int32)
    return ids


def decoder_cases(pipeline: Any, selection: Selection, unet_cases: Cases) -> Cases:
    """Latents of the trajectory's end, scaled as the pipeline scales them, and normal ones of other shapes."""
    import numpy as np

    cases = Cases()
    trajectory = [index for index, case in unet_cases if case.group == "trajectory"]
    for index in (trajectory[len(trajectory) // 2], trajectory[-1]):
        latents = unet_cases.get(index, "inputs")["sample"][-1:] / pipeline.vae.config.scaling_factor
        step = unet_cases.cases[index].step
        cases.add(
            Case(f"latents of step {step + 1 if step is not None else 0}", "trajectory"), {"latent_sample": latents}
        )
    random = np.random.default_rng(selection.seed + 2)
    channels = pipeline.vae.config.latent_channels
    for batch, rows, columns in selection.vae_shapes:
        latents = random.standard_normal((batch, channels, rows, columns), dtype=np.float32)
        cases.add(Case(f"shape {batch}x{rows}x{columns}", "shape"), {"latent_sample": latents})
    return cases
