"""Every scheduler by its name is diffusers' own: the same timesteps, and the same way from noise to image."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from named_schedulers import OF_SD
from sampled import sampled
from torch.overrides import TorchFunctionMode

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.brownian import BrownianPath
from sdflow.families.shared.noising import DIFFUSION, FLOW, Flow
from sdflow.families.shared.sampler_names import (
    available,
    known_scheduler,
    require_installed,
    scheduler_name,
    scheduler_of,
)
from sdflow.families.shared.schedulers import (
    FLOW_SCHEDULERS,
    NOISE_SCHEDULERS,
    SAMPLERS,
    SCHEDULERS,
    SPACINGS,
    from_config,
    parts_of,
    requirements,
    scheduler_class,
)
from sdflow.machine.packages import missing
from sdflow.runtime.denoiser.schedule import Schedule, named_scheduler, trace
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources.architectures import architecture_config

BASE = {**OF_SD, "timestep_spacing": "leading"}
SHAPE = (1, 2, 3, 4)
APART = 1e-5
"""Relative L2. The factors are kept in float32."""

# As https://huggingface.co/docs/diffusers/api/schedulers/overview has them, by A1111's names; None: diffusers' pages name no
# counterpart, and k-diffusion's code was read.
DOCUMENTED: dict[str, tuple[str, dict[str, Any]]] = {
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "DPM++ 2M SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "DPM++ 2M SDE Heun": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
    ),
    "DPM++ 3M SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "solver_order": 3}),
    "DPM++ SDE": ("DPMSolverSDEScheduler", {}),
    "DPM2": ("KDPM2DiscreteScheduler", {}),
    "DPM2 a": ("KDPM2AncestralDiscreteScheduler", {}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "UniPC": ("UniPCMultistepScheduler", {}),
}
SPACED: dict[str, dict[str, Any]] = {
    "": {},
    "SGM Uniform": {"timestep_spacing": "trailing"},
    "Karras": {"use_karras_sigmas": True},
    "Exponential": {"use_exponential_sigmas": True},
    "Beta": {"use_beta_sigmas": True},
}


def in_diffusers(sampler: str, schedule: str, **config: Any) -> Any:
    """diffusers' own, by the tables above."""
    cls, options = DOCUMENTED[sampler]
    return getattr(diffusers, cls).from_config({**BASE, **config}, **options, **SPACED[schedule])


@contextmanager
def recorded(scheduler: Any) -> Iterator[list[torch.Tensor]]:
    """The independent normal noises that a scheduler draws while this is entered."""
    drawn: list[torch.Tensor] = []

    class Recorded(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = function(*args, **(kwargs or {}))
            if function is torch.randn:
                drawn.append(value.double())
            return value

    if type(scheduler).__name__ != "DPMSolverSDEScheduler":
        with Recorded():
            yield drawn
        return
    from diffusers.schedulers.scheduling_dpmsolver_sde import BrownianTreeNoiseSampler

    sigmas = scheduler.sigmas
    tree = BrownianTreeNoiseSampler(
        torch.zeros(SHAPE, dtype=torch.float64), sigmas[sigmas > 0].min().item(), sigmas.max().item(), seed=7
    )
    before: list[tuple[float, float, torch.Tensor]] = []

    def sampler(sigma: torch.Tensor, sigma_next: torch.Tensor) -> torch.Tensor:
        """torchsde's Brownian motion. Of an interval that prolongs the one before, what is new is the rest."""
        begin, end, found = float(sigma), float(sigma_next), tree(sigma, sigma_next)
        walked = found * (begin - end) ** 0.5
        if before and before[-1][0] == begin:
            _, middle, first = before[-1]
            drawn.append((walked - first) / (middle - end) ** 0.5)
        else:
            drawn.append(walked / (begin - end) ** 0.5)
        before.append((begin, end, walked))
        return found

    scheduler.noise_sampler = sampler
    yield drawn


def walked(
    scheduler: Any, noise: torch.Tensor, image: torch.Tensor | None, outputs: list[torch.Tensor], skipped: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the denoiser is given before each run, and the result; and the noises that the scheduler drew: the loop of diffusers'
    StableDiffusionImg2ImgPipeline."""
    timesteps = scheduler.timesteps[skipped * scheduler.order :]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skipped * scheduler.order)
    latents = noise * scheduler.init_noise_sigma if image is None else scheduler.add_noise(image, noise, timesteps[:1])
    known = {"generator": torch.Generator().manual_seed(0), "eta": 0.0}
    accepted = inspect.signature(scheduler.step).parameters
    options = {name: value for name, value in known.items() if name in accepted}
    given = []
    with recorded(scheduler) as drawn:
        for timestep, output in zip(timesteps, outputs, strict=True):
            given.append(scheduler.scale_model_input(latents, timestep))
            latents = scheduler.step(output, timestep, latents, **options).prev_sample
    return [*given, latents], drawn


def by_table(schedule: Schedule, terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.einsum("rt,t...->r...", schedule.inputs.double(), torch.stack(terms))


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(DOCUMENTED)),
    st.sampled_from(sorted(SPACED)),
    st.integers(1, 25),
    st.one_of(st.none(), st.floats(0.05, 1.0)),
    st.sampled_from(["epsilon", "v_prediction", "sample"]),
)
def test_the_way_to_the_image_is_that_of_diffusers(
    sampler: str, schedule: str, steps: int, strength: float | None, kind: str
) -> None:
    name = scheduler_of(sampler, schedule)
    if name is None:
        assert (sampler, SPACED[schedule].keys() & {"timestep_spacing"}) == ("Euler a", set())
        return
    if missing(*requirements(name)):
        return
    skipped = 0 if strength is None else steps - min(int(steps * strength), steps)
    options = {} if strength is None else {"strength": strength, "from_image": True}
    theirs = in_diffusers(sampler, schedule, prediction_type=kind)
    theirs.set_timesteps(steps)
    ours = named_scheduler(name, {**BASE, "prediction_type": kind}, DIFFUSION)
    runs = len(theirs.timesteps[skipped * theirs.order :])
    outputs, noise, image = [normal(10 + run) for run in range(runs)], normal(1), normal(2)
    try:
        expected, drawn = walked(theirs, noise, None if strength is None else image, outputs, skipped)
    except (NotImplementedError, IndexError):
        expected, drawn = None, []
    if expected is None or skipped == steps:
        with pytest.raises(UsageError, match="cannot run|no steps remain"):
            trace(ours, steps, **options)
        return
    found = trace(ours, steps, **options)
    assert found.runs == runs and found.draws == len(drawn)
    torch.testing.assert_close(
        found.timesteps[:, 0], theirs.timesteps[skipped * theirs.order :].float(), rtol=0, atol=1e-3
    )
    for have, want in zip(by_table(found, [noise, image, *drawn, *outputs]), expected, strict=True):
        assert (have - want).norm() <= APART * want.norm(), (name, steps)


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
def test_a_name_says_how_its_scheduler_is_set_and_is_found_again(name: str) -> None:
    if missing(*requirements(name)):
        pytest.skip(f"pip install {' '.join(requirements(name))}")
    made = named_scheduler(name, {**BASE, "use_karras_sigmas": False}, DIFFUSION)
    assert scheduler_name(made) == name
    assert made.order == SAMPLERS[parts_of(name)[0]].runs
    on = [each for each in ("karras", "exponential", "beta") if made.config.get(f"use_{each}_sigmas")]
    assert on == [each for each in [parts_of(name)[1]] if each not in ("", "trailing")]


def test_sigmas_of_a_checkpoint_give_way_to_those_that_are_named() -> None:
    karras = {**BASE, "use_karras_sigmas": True}
    assert named_scheduler("dpm++_2m", karras, DIFFUSION).config.use_karras_sigmas, "nothing is said of them"
    named = named_scheduler("dpm++_2m_exponential", karras, DIFFUSION).config
    assert (named.use_karras_sigmas, named.use_exponential_sigmas) == (False, True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("DPM++ 2M Karras", "dpm++_2m_karras"),
        ("dpmpp_2m_karras", "dpm++_2m_karras"),
        ("dpmpp_2m_k", "dpm++_2m_karras"),
        ("k_dpmpp_2m", "dpm++_2m"),
        ("DPM++ 2M SDE Exponential", "dpm++_2m_sde_exponential"),
        ("dpmpp_sde_beta", "dpm++_sde_beta"),
        ("Euler a", "euler_a"),
        ("euler_ancestral", "euler_a"),
        ("k_euler_a", "euler_a"),
        ("Euler SGM Uniform", "euler_trailing"),
        ("dpm_2_ancestral", "dpm2_a"),
        ("uni_pc", "unipc"),
        ("PLMS", "pndm"),
        ("FLOW_EULER", "flow_euler"),
    ],
)
def test_names_of_other_programs_are_understood(text: str, name: str) -> None:
    assert known_scheduler(text) == name


def test_a_schedule_type_is_told_apart_as_in_the_webui_and_comfyui() -> None:
    assert scheduler_of("DPM++ 2M", "Karras") == scheduler_of("dpmpp_2m", "karras") == "dpm++_2m_karras"
    assert scheduler_of("DPM++ 2M", "Automatic") == "dpm++_2m_karras"
    assert scheduler_of("DPM++ 2M SDE", "Automatic") == "dpm++_2m_sde_exponential"
    assert scheduler_of("Euler", "Automatic") == scheduler_of("Euler", "normal") == "euler"
    assert scheduler_of("DPM++ 2M Karras", "Exponential") == "dpm++_2m_karras", "the webui heeds the name alone"
    assert scheduler_of("Euler", "Karras", FLOW_SCHEDULERS) == "flow_euler_karras"
    assert scheduler_of("DPM++ 2M", "KL Optimal") is None


def test_every_spelling_means_one_scheduler() -> None:
    for schedulers in (NOISE_SCHEDULERS, FLOW_SCHEDULERS):
        for name in schedulers:
            sampler, spacing = parts_of(name)
            row = SAMPLERS[sampler]
            for each in filter(None, (sampler, row.webui, row.comfyui, row.invokeai)):
                assert scheduler_of(f"{each}_{spacing}", among=schedulers) == name


@pytest.mark.parametrize(
    ("text", "schedulers", "says"),
    [
        ("dpm++_2n_karras", NOISE_SCHEDULERS, r"no scheduler is named 'dpm\+\+_2n_karras'; did you mean 'dpm\+\+_2m_karras'"),
        ("DPM++ 2S a", NOISE_SCHEDULERS, r"no scheduler is named 'DPM\+\+ 2S a'; did you mean"),
        ("euler_a_karras", NOISE_SCHEDULERS, "no scheduler is named 'euler_a_karras'; did you mean 'euler_karras'"),
        ("heun", FLOW_SCHEDULERS, "heun does not fit this model"),
        ("flow_euler", NOISE_SCHEDULERS, "flow_euler does not fit this model; did you mean 'euler'"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest(text: str, schedulers: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        known_scheduler(text, schedulers=schedulers)
    assert refused.value.remedy is not None and "also with" in refused.value.remedy


def test_the_manual_has_the_rows_of_the_tables() -> None:
    def called(options: Mapping[str, Any]) -> str:
        return ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in options.items()
        )

    lines = (Path(__file__).parents[2] / "docs/samplers.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    samplers = [
        [f"`{name}`", row.webui, row.comfyui, f"`{row.scheduler}({called(row.options)})`", str(row.runs)]
        for name, row in SAMPLERS.items()
    ]
    spacings = [
        [f"`_{name}`", row.webui, f"`{called({key: value for key, value in row.options.items() if value})}`"]
        for name, row in SPACINGS.items()
    ]
    assert rows[: len(samplers)] == samplers
    assert [[cells[0], cells[1], cells[3]] for cells in rows[len(samplers) :]] == spacings


@pytest.mark.parametrize("name", ["dpm++_sde_karras", "lms", "euler_beta", "flow_euler_beta", "heun"])
def test_what_a_scheduler_needs_is_said_and_it_is_not_offered_without(name: str) -> None:
    absent = missing(*requirements(name))
    assert (name in available({name: ("", {})})) == (not absent)
    if not absent:
        require_installed(name)
        return
    noising = FLOW if name in FLOW_SCHEDULERS else DIFFUSION
    for ask in (lambda: require_installed(name), lambda: named_scheduler(name, BASE, noising)):
        with pytest.raises(UsageError, match=f"needs {absent[0]}") as refused:
            ask()
        assert "pip install 'sdflow[samplers]'" in str(refused.value.remedy)


@pytest.mark.parametrize("kind", ["karras", "exponential", "beta"])
@pytest.mark.parametrize(
    "shift", [{"shift": 3.0}, {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}]
)
def test_sigmas_of_flow_matching_are_those_of_diffusers(kind: str, shift: dict[str, Any]) -> None:
    name = f"flow_euler_{kind}"
    if missing(*requirements(name)):
        pytest.skip(f"pip install {' '.join(requirements(name))}")
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(**shift, **{f"use_{kind}_sigmas": True})
    ours = named_scheduler(name, diffusers.FlowMatchEulerDiscreteScheduler(**shift).config, FLOW)
    for steps, tokens in product((2, 9, 28), (256, 4096)):
        FLOW.as_diffusers(theirs, steps, tokens)
        found = trace(ours, steps, noising=FLOW, tokens=tokens)
        torch.testing.assert_close(found.timesteps[:, 0], theirs.timesteps, rtol=1e-6, atol=1e-3)
        outputs, latents = [normal(run).float() for run in range(steps)], normal(99).float()
        terms = [latents.double(), latents.double(), *(each.double() for each in outputs)]
        for timestep, output in zip(theirs.timesteps, outputs, strict=True):
            latents = theirs.step(output, timestep, latents).prev_sample
        torch.testing.assert_close(by_table(found, terms)[-1].float(), latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["karras", "exponential", "beta"])
@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if isinstance(each.noising, Flow)])
def test_every_flow_family_spaces_its_steps_as_its_pipeline_of_diffusers(family: str, kind: str) -> None:
    """Which gives the scheduler sigmas of its own, or a shift, or neither."""
    name, noising = f"flow_euler_{kind}", FAMILIES[family].noising
    if missing(*requirements(name)):
        pytest.skip(f"pip install {' '.join(requirements(name))}")
    for architecture in FAMILIES[family].architectures:
        config = architecture_config(architecture, "scheduler")
        theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config, **{f"use_{kind}_sigmas": True})
        plain = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
        noising.as_diffusers(theirs, 8, 4096)
        noising.as_diffusers(plain, 8, 4096)
        found = trace(named_scheduler(name, plain.config, noising), 8, noising=noising, tokens=4096)
        torch.testing.assert_close(found.timesteps[:, 0], theirs.timesteps, rtol=1e-6, atol=1e-3)
        assert (found.timesteps[1:-1, 0] - plain.timesteps[1:-1]).abs().max() > 1, "the name changes nothing"


def test_a_path_has_the_increments_of_brownian_motion() -> None:
    """Over many paths: variance 1, and the correlation of an interval with its beginning, sqrt of the part that it is."""
    count = 40_000
    generator = torch.Generator().manual_seed(1)
    path = BrownianPath(lambda: torch.randn(count, generator=generator, dtype=torch.float64))
    first, whole, later = path(9.0, 6.0), path(9.0, 4.0), path(4.0, 1.0)
    for each in (first, whole, later):
        assert abs(each.var().item() - 1) < 0.03
    correlation = np.corrcoef(torch.stack([first, whole, later]).numpy())
    assert abs(correlation[0, 1] - (3 / 5) ** 0.5) < 0.02
    assert abs(correlation[0, 2]) < 0.02 and abs(correlation[1, 2]) < 0.02
    with pytest.raises(UsageError, match="does not remove noise"):
        path(4.0, 4.0)


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)


def test_a_pipeline_takes_any_programs_name(pipeline: Pipeline, tiny_pipeline: Path) -> None:
    loaded = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, scheduler="DPM++ 2M Karras")
    assert loaded.scheduler.config == pipeline.named_scheduler("dpm++_2m_karras").config


@pytest.mark.parametrize("name", ["dpm++_2m_sde_karras", "dpm2_a", "dpm++_sde"])
def test_images_of_a_batch_are_those_of_their_seeds_alone(
    name: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing(*requirements(name)):
        pytest.skip(f"pip install {' '.join(requirements(name))}")
    monkeypatch.setattr(pipeline, "scheduler", pipeline.named_scheduler(name))
    options: dict[str, Any] = {"num_inference_steps": 3, "height": 64, "width": 64, "output_type": "np"}

    def generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    told: list[tuple[int, int]] = []
    alone = [
        pipeline(
            "a horse", generator=generators(seed), callback_on_step_end=lambda i, t, n: told.append((i, n)), **options
        ).images
        for seed in (1, 2)
    ]
    runs = 3 if SAMPLERS[parts_of(name)[0]].runs == 1 else 5
    assert told == [(index, runs) for index in range(runs)] * 2
    together = pipeline("a horse", num_images_per_prompt=2, generator=generators(1, 2), **options).images
    assert np.abs(alone[0] - alone[1]).max() > 0.05
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)


OTHERS: dict[str, dict[str, Any]] = {
    "none": {},
    "of another scheduler": {"_use_default_values": ["beta_start"], "sigma_min": 0.1, "solver_order": 3},
}


@pytest.mark.parametrize(
    ("name", "entries"),
    sampled(
        product([*NOISE_SCHEDULERS, *FLOW_SCHEDULERS], OTHERS),
        lambda case: case[0],
        lambda case: (parts_of(case[0])[0], case[1]),
    ),
)
def test_a_scheduler_is_made_as_diffusers_makes_it(name: str, entries: str) -> None:
    """Without importing all other schedulers, which diffusers does to know whose entries those are that this one ignores."""
    if missing(*requirements(name)):
        pytest.skip("its packages are not installed")
    cls, options = SCHEDULERS[name]
    config = {"num_train_timesteps": 1000} if name in FLOW_SCHEDULERS else BASE
    config = {**config, **OTHERS[entries], "_class_name": "PNDMScheduler"}
    ours = from_config(scheduler_class(cls), config, **options)
    theirs = scheduler_class(cls).from_config(config, **options)
    assert dict(ours.config) == dict(theirs.config)
    for attribute, value in vars(theirs).items():
        found = vars(ours)[attribute]
        if isinstance(value, torch.Tensor):  # not a number, where there is no step between
            torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
        else:
            np.testing.assert_equal(found, value)
