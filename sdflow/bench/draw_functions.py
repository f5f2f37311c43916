"""Prepare an engine to generate: sdflow's runtime, or diffusers' pipeline on PyTorch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.bench.engines import Engine
from sdflow.bench.sweep import Settings, SweepPoint, call_options, latents
from sdflow.errors import UsageError
from sdflow.families.shared.approximation import EXACT, Approximation
from sdflow.families.shared.base import Family
from sdflow.families.shared.torch_start import torch_start
from sdflow.manifest import REFINER
from sdflow.processes.patched import patched
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.ensemble import Ensemble, hand_over
from sdflow.runtime.files.folder import (
    folder_adapters,
    folder_configs,
    folder_defaults,
    folder_family,
    folder_latents,
    folder_task,
    load_companions,
    read_options,
    refiner_of,
)
from sdflow.runtime.files.recorded_tuning import Recorded, recorded_tuning
from sdflow.runtime.kernels.library import kernel_library
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.tuning import UNTUNED
from sdflow.samples.canvas import canvas, references, shown
from sdflow.stop import end_children_when_told
from sdflow.targets import TARGETS

if TYPE_CHECKING:
    import torch

Mark = Callable[[], None]
"""Called after the text is encoded, and after every step."""

Draw = Callable[[SweepPoint, Mark | None], "np.ndarray"]
"""Images of a case, float32 (batch, height, width, 3) in [0, 1]."""


def ignore() -> None:
    return None


def onnxruntime_draw(folder: Path, engine: Engine, settings: Settings) -> tuple[Draw, str]:
    """sdflow's pipeline on one target, with a note on its tuning and kernels."""
    target = TARGETS[engine.target]
    recorded = recorded_tuning(folder, target) if settings.tuning else Recorded(UNTUNED)
    pipeline = Ensemble.of_folder(
        folder, target, scheduler=settings.scheduler, checker=False, threads=settings.threads, tuning=recorded.tuning
    )

    notes = [recorded.note]
    if target.name == "cuda":
        own = recorded.tuning.own_kernels and kernel_library() is not None
        notes.append("sdflow's own kernels where they fit" if own else "ONNX Runtime's kernels only")
    return pipeline_draw(pipeline, folder, settings, engine.fewer), "; ".join(note for note in notes if note)


def pipeline_draw(
    pipeline: Pipeline | Ensemble, folder: Path, settings: Settings, fewer: Approximation = EXACT
) -> Draw:
    """Generate with sdflow's pipeline of a folder, or its ensemble. fewer: an approximation."""
    import torch

    base = pipeline.base if isinstance(pipeline, Ensemble) else pipeline

    def draw(case: SweepPoint, mark: Mark | None = None) -> np.ndarray:
        drawn = pipeline(
            **call_options(pipeline, case, settings),
            **shown(folder_adapters(folder)),
            **fewer.settings(),
            latents=latents(case, settings.seed, base.latents),
            generator=torch.Generator().manual_seed(settings.seed),
            output_type="np",
            callback_on_text_end=mark,
            callback_on_step_end=(lambda *_: mark()) if mark else None,
        )
        return np.asarray(drawn.images)

    return draw


def torch_draw(
    folder: Path, modules: Mapping[str, torch.nn.Module], engine: Engine, settings: Settings, device: str, dtype: str
) -> Draw:
    """diffusers' pipeline over copies of these modules, with the folder's tokenizer and scheduler; and its refiner's,
    whose modules are `refiner/COMPONENT`.

    On a GPU, and when compiling, convolutions use channels last; plain eager stays as diffusers loads it.
    """
    import torch

    element = getattr(torch, dtype)
    # Uses torch's own `to`: diffusers' warns about modules kept in float32, which do not occur here.
    moved: dict[Any, Any] = {}
    parts: dict[str, Any] = {}
    convolutional, begins = _convolutional(folder_family(folder)), f"{REFINER}/"
    for name, module in modules.items():
        # Shared modules stay shared, except those that engines change: each pipeline gets its own.
        key = id(module), name.removeprefix(begins) in convolutional and name.startswith(begins)
        if key not in moved:
            moved[key] = torch.nn.Module.to(_own(module), device, element)
        parts[name] = moved[key]
    own = {name: part for name, part in parts.items() if not name.startswith(begins)}
    pipeline, marks = _torch_pipeline(folder, own, engine, settings, device), [ignore]
    refiner, encode = refiner_of(folder), pipeline.encode_prompt
    refining = None
    if refiner is not None:
        theirs = {name.removeprefix(begins): part for name, part in parts.items() if name.startswith(begins)}
        refining = _torch_pipeline(refiner, theirs, engine, settings, device)

    def encode_and_mark(*arguments: Any, **options: Any) -> Any:
        encoded = encode(*arguments, **options)
        marks[0]()
        return encoded

    pipeline.encode_prompt = encode_and_mark
    family, what, task = folder_family(folder), folder_latents(folder), folder_task(folder)
    eta = folder_defaults(folder)["text"].eta

    def draw(case: SweepPoint, mark: Mark | None = None) -> np.ndarray:
        marks[0] = mark or ignore

        def on_step(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            marks[0]()
            return tensors

        noise = latents(case, settings.seed, what).to(device, element)
        prompts = [settings.prompt] * case.batch
        both: dict[str, Any] = {
            **_negatives(pipeline, settings, case.batch),
            "num_inference_steps": case.steps,
            "guidance_scale": settings.guidance_scale,
            "generator": torch.Generator().manual_seed(settings.seed),
            **({"eta": eta} if eta else {}),
            "callback_on_step_end": on_step if mark else None,
            **family.reference_arguments_of(folder_configs(folder)),
        }
        if settings.references and family.references is not None:
            both |= family.references.of_diffusers(references(settings.references, case.height, case.width))
        place = hand_over(case.steps)
        ends = {"output_type": "np"} if refining is None else {"output_type": "latent", "denoising_end": place}
        # Disable TensorFloat-32, which rounds to 10 bits, for float32 convolutions; elsewhere PyTorch has it off.
        with patched(torch.backends.cudnn, allow_tf32=False):
            given = canvas(task, case.height, case.width)
            start = torch_start(pipeline, noise, case.steps, pack=family.packed, scale=what.scale, **given)
            drawn = pipeline(prompt=prompts, **shown(folder_adapters(folder)), **start, **both, **ends).images
            if refining is not None:
                drawn = refining(prompts, image=drawn, denoising_start=place, output_type="np", **both).images
        images: np.ndarray = drawn
        return images

    return draw


def _torch_pipeline(folder: Path, parts: dict[str, Any], engine: Engine, settings: Settings, device: str) -> Any:
    """One of diffusers' pipelines. parts: component -> module."""
    import torch

    family = folder_family(folder)
    if engine.compile_mode or (device == "cuda" and engine.attention != "plain"):
        for component in _convolutional(family):
            parts[component].to(memory_format=torch.channels_last)
    companions = load_companions(folder)
    if settings.scheduler is not None:
        companions["scheduler"] = named_scheduler(settings.scheduler, companions["scheduler"].config, family.noising)
    companions["scheduler"].step = with_float32_noise(companions["scheduler"].step)
    pipeline = family.torch_pipeline(parts, companions, read_options(folder))
    pipeline.set_progress_bar_config(disable=True)
    if adapters := folder_adapters(folder):
        if engine.attention != "sdpa" or engine.fused_qkv:  # would replace the image prompts' attention
            raise UsageError(
                f"{engine.name} has no attention for IP-Adapters",
                remedy="Use torch-sdpa or torch-compile.",
            )
        pipeline.set_ip_adapter_scale([1.0] * adapters)
    _specialize(pipeline, family, engine)
    return pipeline


def _negatives(pipeline: Any, settings: Settings, count: int) -> dict[str, Any]:
    """Arguments for the negative prompt. Raises UsageError if diffusers' pipeline does not support it."""
    if "negative_prompt" in inspect.signature(pipeline.__call__).parameters:
        return {"negative_prompt": None if settings.negative_prompt is None else [settings.negative_prompt] * count}
    if settings.negative_prompt is None:
        return {}
    raise UsageError(
        f"diffusers' {type(pipeline).__name__} takes no negative prompt", where="--negative", remedy="Leave it out."
    )


def with_float32_noise(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's step that draws noise in float32 whatever the model's type; otherwise engines' images would
    differ."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Float32(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if function is not torch.randn:
                return function(*args, **given)
            return function(*args, **{**given, "dtype": torch.float32}).to(given.get("dtype") or torch.float32)

    @wraps(step)  # diffusers inspects its parameters
    def stepped(*arguments: Any, **options: Any) -> Any:
        with Float32():
            return step(*arguments, **options)

    return stepped


def _own(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that can be changed, sharing the parameters' memory until they are written."""
    import torch

    shared = {
        id(parameter): torch.nn.Parameter(parameter.data, requires_grad=False) for parameter in module.parameters()
    }
    return copy.deepcopy(module, shared)


def _convolutional(family: Family) -> list[str]:
    """The components that process images and latents: denoiser and decoder."""
    return [family.part(name).component for name in (family.denoiser, family.decoder)]


def _specialize(pipeline: Any, family: Family, engine: Engine) -> None:
    """Apply the engine's settings to diffusers' pipeline."""
    import torch

    denoiser, decoder = _convolutional(family)
    if engine.attention == "plain":
        for component in (denoiser, decoder):
            getattr(pipeline, component).set_default_attn_processor()
        for name in family.text:
            if (encoder := getattr(pipeline, family.part(name).component)) is not None:
                encoder.set_attn_implementation("eager")
    if engine.attention == "xformers":
        pipeline.enable_xformers_memory_efficient_attention()
    if engine.fused_qkv:
        pipeline.fuse_qkv_projections()
    if engine.int8:
        _quantize([getattr(pipeline, component) for component in (denoiser, decoder)])
    if engine.compile_mode:
        from torch._inductor import config, list_mode_options

        end_children_when_told()
        known = {name: value for name, value in (engine.flags or {}).items() if hasattr(config, name)}
        options = {**list_mode_options(engine.compile_mode), **known}
        compiled = {"fullgraph": True, "dynamic": False, "options": options}
        setattr(pipeline, denoiser, torch.compile(getattr(pipeline, denoiser), **compiled))
        module = getattr(pipeline, decoder)
        module.decode = torch.compile(module.decode, **compiled)


# Linear layers without a gain: https://github.com/huggingface/diffusion-fast, utils/pipeline_utils.py
_NOT_QUANTIZED = {
    (1280, 640), (1920, 1280), (1920, 640), (2048, 1280), (2048, 2560), (2560, 1280), (256, 128), (2816, 1280),
    (320, 640), (512, 1536), (512, 256), (512, 512), (640, 1280), (640, 1920), (640, 320), (640, 5120), (640, 640),
    (960, 320), (960, 640),
}  # fmt: skip


def _quantize(modules: Sequence[Any]) -> None:
    """Quantize linear layers to int8 with torchao, and 1x1 convolutions that can be one, as in diffusion-fast."""
    import torch
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from torchao.quantization.quant_api import swap_conv2d_1x1_to_linear

    def convolution(module: Any, *_: Any) -> bool:
        if not isinstance(module, torch.nn.Conv2d) or module.kernel_size != (1, 1):
            return False
        return 128 in (module.in_channels, module.out_channels)

    def linear(module: Any, *_: Any) -> bool:
        if not isinstance(module, torch.nn.Linear) or module.in_features <= 16:
            return False
        return (module.in_features, module.out_features) not in _NOT_QUANTIZED

    for module in modules:
        swap_conv2d_1x1_to_linear(module, convolution)
        quantize_(module, Int8DynamicActivationInt8WeightConfig(), linear)
