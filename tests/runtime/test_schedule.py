"""The factors of every scheduler, traced a vector at a time, are bit for bit those of a dense trace; memory bounds the steps."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from named_schedulers import OF_SD as BASE
from named_schedulers import SAMPLERS
from torch.overrides import TorchFunctionMode

from sdflow.errors import UsageError
from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.denoiser.schedule import named_scheduler, require_steps, table_bytes, trace
from sdflow.runtime.denoiser.start import require_room

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"from_image": True, "strength": 0.6},
    {"from_image": True, "strength": 0.7, "inpaint": True, "eta": 0.4},
    {"inpaint": True},
    {"span": (None, 0.7)},
    {"span": (0.7, None)},
)
STEPS = 9


def made(name: str, kind: str = "epsilon") -> Any:
    return named_scheduler(name, {**BASE, "prediction_type": kind}, DIFFUSION)


def dense(
    scheduler: Any,
    *,
    strength: float = 1.0,
    from_image: bool = False,
    inpaint: bool = False,
    eta: float = 0.0,
    span: tuple[float | None, float | None] = (None, None),
) -> dict[str, torch.Tensor]:
    """All unit vectors at once, as an identity: what `trace` did first."""
    scheduler = type(scheduler).from_config(scheduler.config)
    scheduler.set_timesteps(STEPS)
    skipped = (STEPS - min(int(STEPS * strength), STEPS)) * scheduler.order
    begin, end = span
    if begin is not None:
        left = int((scheduler.timesteps < round(1000 - begin * 1000)).sum())
        skipped = (
            len(scheduler.timesteps) - left - (scheduler.order == 2 and left % 2 == 0)
        )  # as StableDiffusionXLImg2Img
    timesteps = scheduler.timesteps[skipped:]
    if end is not None:
        timesteps = timesteps[: int((timesteps >= round(1000 - end * 1000)).sum())]
    runs = len(timesteps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skipped)
    terms = 2 + 3 * runs
    units = torch.eye(terms, dtype=torch.float64).reshape(terms, 1, terms, 1, 1)
    noise, image, drawn, outputs = units[0], units[1], iter(units[2:]), units[-runs:]
    draws = 0

    class Draw(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal draws
            if function is not torch.randn:
                return function(*args, **(kwargs or {}))
            draws += 1
            return next(drawn)

    options = {"eta": eta} if "eta" in inspect.signature(scheduler.step).parameters else {}
    latents = scheduler.add_noise(image, noise, timesteps[:1]) if from_image else noise * scheduler.init_noise_sigma
    latents = image if begin is not None else latents
    inputs, kept, known = [], [], latents
    with Draw():
        for index, timestep in enumerate(timesteps):
            inputs.append(scheduler.scale_model_input(latents, timestep))
            kept.append(known * (inputs[-1].norm() / latents.norm()))
            latents = scheduler.step(outputs[index], timestep, latents, **options).prev_sample
            if inpaint:
                last = index + 1 == runs
                known = image if last else scheduler.add_noise(image, noise, timesteps[index + 1 : index + 2])

    def rows(vectors: list[torch.Tensor]) -> torch.Tensor:
        factors = torch.stack(vectors).reshape(len(vectors), terms)
        return torch.cat([factors[:, : 2 + draws], factors[:, -runs:]], dim=1).to(torch.float32)

    return {
        "inputs": rows([*inputs, latents]),
        "kept": rows([*kept, known]),
        "timesteps": timesteps.to(torch.float32)[:, None],
    }


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_factors_are_bit_for_bit_those_of_a_dense_trace(name: str, options: dict[str, Any]) -> None:
    expected, found = dense(made(name), **options), trace(made(name), STEPS, **options)
    assert torch.equal(found.timesteps, expected["timesteps"])
    assert torch.equal(found.inputs, expected["inputs"])
    assert torch.equal(found.kept, expected["kept"][:, :2])
    assert not expected["kept"][:, 2:].any(), "what a mask keeps is noise and image alone"


@pytest.mark.parametrize("scale", [None, 7.5])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("ddim", "unipc") for kind in ("epsilon", "v_prediction", "sample")),
        *((name, kind) for name in ("euler", "euler_a") for kind in ("epsilon", "v_prediction")),
    ],
)
def test_what_is_clean_follows_from_the_rows_of_inputs(name: str, scale: float | None, kind: str) -> None:
    scheduler = made(name, kind)
    found = trace(scheduler, STEPS)
    schedule = found if scale is None else found.guided(scale)
    variances = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).double() ** 0.5
    for index in range(schedule.runs):
        known, there = schedule.known(index), schedule.known(index + 1)
        given = schedule.inputs[index, :there].double()
        output = torch.zeros(there, dtype=torch.float64)
        output[known:] = torch.tensor([1.0] if scale is None else [1 - scale, scale])
        place = float(schedule.timesteps[index])
        low = int(place)
        sigma = variances[low] + (place - low) * (variances[min(low + 1, 999)] - variances[low])
        alpha = 1 / (sigma**2 + 1) ** 0.5
        noise = (1 - alpha**2) ** 0.5
        expected = {
            "epsilon": (given - noise * output) / alpha,
            "v_prediction": alpha * given - noise * output,
            "sample": output,
        }[kind]
        torch.testing.assert_close(schedule.clean_row(index).double(), expected, rtol=1e-5, atol=1e-5)


def test_where_a_scheduler_does_not_say_how_much_noise_there_is_the_next_latents_are_shown() -> None:
    scheduler = diffusers.EDMEulerScheduler()
    schedule = trace(scheduler, STEPS)
    scheduler.set_timesteps(STEPS)
    for index in range(STEPS):
        there, sigma = schedule.known(index + 1), float(scheduler.sigmas[index + 1])
        scale = 1.0 if index + 1 == STEPS else (sigma**2 + scheduler.config.sigma_data**2) ** -0.5
        latents = schedule.inputs[index + 1, :there] / scale
        torch.testing.assert_close(schedule.clean_row(index), latents, rtol=1e-5, atol=1e-5)


MEASURED = """
import resource, sys
from sdflow.runtime.denoiser.schedule import named_scheduler, trace
from test_schedule import made
trace(made("euler_a"), 3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
schedule = trace(made("euler_a"), 1500)
print(schedule.inputs.shape, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_many_steps_take_about_the_memory_of_their_table() -> None:
    """An identity of all terms took 162 MB for 1,500 steps, twice, and what was made of it more."""
    found = subprocess.run(
        [sys.executable, "-c", MEASURED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    taken = int(found.stdout.split()[-1])
    assert "[1501, 3002]" in found.stdout
    assert taken < table_bytes(1500) < 100e6


def test_steps_whose_table_does_not_fit_are_refused_with_what_is_free() -> None:
    with pytest.raises(UsageError, match=r"1,000,000,000 steps need a table of .* are free"):
        require_steps(10**9)
    with pytest.raises(UsageError, match="0 steps were requested"):
        require_steps(0)
    require_steps(1000)


def test_steps_whose_outputs_do_not_fit_at_a_size_are_refused() -> None:
    schedule = trace(made("euler"), STEPS)
    with pytest.raises(UsageError, match=r"9 steps at this size need .* are free"):
        require_room(schedule, (1, 4, 1 << 20, 1 << 20), "cpu")
    require_room(schedule, (1, 4, 128, 128), "cpu")
