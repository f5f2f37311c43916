"""The reference: the PyTorch model in fp32, and plain fp16 PyTorch beside it, on inputs from a real denoising run.

The pipeline is diffusers' own, its modules are loaded as sdflow loads checkpoints; nothing of what builds an artifact
(tracing, recipes, passes) takes part. The UNet's inputs are what diffusers fed it, recorded on the way. The fp16 model
then gets the very same inputs; its text encoder computes attention operator by operator ("eager"), as the exported
graph does where nothing is fused.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.sources import load_module, lora_submodels, read_lora
from sdflow.verify.cases import Case, Cases, write_cases
from sdflow.verify.forwards import FORWARD, Forward, run_cases
from sdflow.verify.half import quick_halves
from sdflow.verify.inputs import decoder_cases, first_latents, further_unet_cases, text_cases
from sdflow.verify.selection import Selection

if TYPE_CHECKING:
    import numpy as np

VERSION = 2
"""Raise it whenever other numbers come out: it is part of the key."""
USES = ("diffusers", "numpy", "torch", "transformers")
PICTURE_FILE = "picture.npz"
SAMPLE_FILE = "sample.npz"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoraMerge:
    """A LoRA file and the scale that it is merged at."""

    path: Path
    scale: float


@dataclass(frozen=True)
class ReferenceRequest:
    """What to compute. loads: submodel -> how to load it. companions: "tokenizer", "scheduler", ... -> folder."""

    loads: Mapping[str, Mapping[str, Any]]
    companions: Mapping[str, Path]
    loras: Sequence[LoraMerge]
    selection: Selection
    out: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "loads": dict(self.loads),
            "companions": {name: str(path) for name, path in self.companions.items()},
            "loras": [{"path": str(lora.path), "scale": lora.scale} for lora in self.loras],
            "selection": self.selection.to_json(),
            "out": str(self.out),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReferenceRequest:
        return cls(
            loads=value["loads"],
            companions={name: Path(path) for name, path in value["companions"].items()},
            loras=[LoraMerge(Path(lora["path"]), lora["scale"]) for lora in value["loras"]],
            selection=Selection.from_json(value["selection"]),
            out=Path(value["out"]),
        )


def load_reference(submodel: str, load: Mapping[str, Any], loras: Sequence[LoraMerge]) -> Any:
    """The submodel's module in fp32 with the LoRAs merged: W + scale * (alpha / rank) * up @ down, by torch."""
    import torch

    module = load_module(submodel, load)
    for lora in loras:
        if submodel not in lora_submodels(lora.path):
            continue
        state = module.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        for key, layer in read_lora(lora.path, {submodel: shapes})[submodel].items():
            delta = torch.from_numpy(layer.up) @ torch.from_numpy(layer.down)
            # In place of the tensor, which may be a read-only map of the checkpoint's file.
            module.get_parameter(key).data = state[key] + lora.scale * layer.scale * delta.reshape(shapes[key])
    return module


def compute(request: ReferenceRequest, progress: Progress) -> dict[str, Any]:
    """Write the cases of every submodel, and the pictures, into `request.out`."""
    import torch

    selection = request.selection
    with torch.no_grad():
        results = _text_to_image(request, progress)
        for submodel in ("vae_encoder", "safety_checker"):
            if submodel in selection.submodels:
                results[submodel] = _alone(submodel, request, progress)
                gc.collect()
    kept = {name: cases for name, cases in results.items() if name in selection.submodels}
    write_cases(request.out, kept, {"selection": selection.to_json()})
    return {"cases": {name: len(cases.cases) for name, cases in kept.items()}}


def _text_to_image(request: ReferenceRequest, progress: Progress) -> dict[str, Cases]:
    """The submodels that draw pictures, run by diffusers' pipeline; the picture goes to PICTURE_FILE."""
    import numpy as np

    selection = request.selection
    progress("reference: loading")
    pipeline = _pipeline(request)
    results = {"text_encoder": text_cases(pipeline, selection)}
    if {"unet", "vae_decoder", "vae_encoder", "safety_checker"}.isdisjoint(selection.submodels):
        between = partial(pipeline.text_encoder.set_attn_implementation, "eager")
        _both(results["text_encoder"], pipeline.text_encoder, FORWARD["text_encoder"], between)
        return results

    progress("reference: denoising in fp32")
    latents = first_latents(selection, pipeline.unet.config["in_channels"])
    unet_cases = Cases()
    with _recorded(pipeline.unet, unet_cases):
        image = _draw(pipeline, selection, latents)
    further_unet_cases(unet_cases, selection)
    vae_cases = decoder_cases(pipeline, selection, unet_cases)
    results |= {"unet": unet_cases, "vae_decoder": vae_cases}
    modules = {"text_encoder": pipeline.text_encoder, "unet": pipeline.unet, "vae_decoder": pipeline.vae}
    for name, module in modules.items():
        progress(f"reference: {name} in fp32")
        run_cases(results[name], "float32", module, FORWARD[name])
    if selection.sample_cases:
        progress("reference: pictures of the sample")
        _sample_pictures(pipeline, selection, request.out)
    pipeline.text_encoder.set_attn_implementation("eager")
    for module in modules.values():
        module.half()
    with quick_halves(*modules.values()):
        for name, module in modules.items():
            progress(f"reference: {name} in fp16")
            run_cases(results[name], "float16", module, FORWARD[name])
        progress("reference: denoising in fp16")
        half_image = _draw(pipeline, selection, latents)
    np.savez(request.out / PICTURE_FILE, latents=latents, float32=image, float16=half_image)
    return results


def _pipeline(request: ReferenceRequest) -> Any:
    import diffusers
    from transformers import CLIPTokenizer

    scheduler_folder = request.companions["scheduler"]
    scheduler = json.loads((scheduler_folder / "scheduler_config.json").read_text(encoding="utf-8"))["_class_name"]
    parts = {
        name: load_reference(submodel, request.loads[submodel], request.loras)
        for name, submodel in (("text_encoder", "text_encoder"), ("unet", "unet"), ("vae", "vae_decoder"))
    }
    pipeline: Any = diffusers.StableDiffusionPipeline(
        **parts,
        tokenizer=CLIPTokenizer.from_pretrained(request.companions["tokenizer"], local_files_only=True),
        scheduler=getattr(diffusers, scheduler).from_pretrained(scheduler_folder),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _draw(pipeline: Any, selection: Selection, latents: np.ndarray) -> np.ndarray:
    """The picture, float32 (rows, columns, 3) in [0, 1]."""
    import numpy as np
    import torch

    scale = pipeline.vae_scale_factor
    picture: np.ndarray = pipeline(
        selection.prompts[0],
        height=selection.rows * scale,
        width=selection.columns * scale,
        num_inference_steps=selection.steps,
        guidance_scale=selection.guidance_scale,
        generator=torch.Generator().manual_seed(selection.seed),
        latents=torch.from_numpy(latents).to(pipeline.unet.dtype),
        output_type="np",
    ).images[0]
    return picture.astype(np.float32)


@contextmanager
def _recorded(unet: Any, cases: Cases) -> Iterator[None]:
    """Every run of the UNet becomes a case of the trajectory, with its result."""
    import numpy as np

    def record(module: Any, arguments: Any, named: Any) -> None:
        sample, timestep = arguments
        step, time = len(cases.cases), float(timestep)
        cases.add(
            Case(f"step {step + 1}, timestep {time:g}", "trajectory", step, time),
            {
                "sample": sample.numpy().copy(),
                "timestep": np.array([time], np.float32),
                "encoder_hidden_states": named["encoder_hidden_states"].numpy().copy(),
            },
        )

    def keep(module: Any, arguments: Any, output: Any) -> None:
        cases.put(len(cases.cases) - 1, "float32", {"out_sample": output[0].numpy().copy()})

    hooks = (unet.register_forward_pre_hook(record, with_kwargs=True), unet.register_forward_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _alone(submodel: str, request: ReferenceRequest, progress: Progress) -> Cases:
    """The submodels that draw nothing: the picture is their input."""
    import numpy as np

    progress(f"reference: {submodel}")
    module = load_reference(submodel, request.loads[submodel], request.loras)
    with np.load(request.out / PICTURE_FILE) as stored:
        picture = stored["float32"][None]
    random = np.random.default_rng(request.selection.seed + 3)
    cases = Cases()
    if submodel == "vae_encoder":
        cases.add(Case("the picture drawn", "trajectory"), {"sample": 2 * picture.transpose(0, 3, 1, 2) - 1})
        scale = picture.shape[1] // request.selection.rows
        for batch, rows, columns in request.selection.vae_shapes:
            noise = random.uniform(-1, 1, (batch, 3, rows * scale, columns * scale)).astype(np.float32)
            cases.add(Case(f"noise {batch}x{rows * scale}x{columns * scale}", "shape"), {"sample": noise})
    else:
        from PIL import Image
        from transformers import CLIPImageProcessor

        extractor = CLIPImageProcessor.from_pretrained(request.companions["feature_extractor"], local_files_only=True)
        drawn = Image.fromarray((picture[0] * 255).round().astype("uint8"))
        clip = extractor(drawn, return_tensors="np").pixel_values.astype(np.float32)
        cases.add(Case("the picture drawn", "trajectory"), {"clip_input": clip, "images": picture})
        both = np.concatenate([clip, random.standard_normal(clip.shape, dtype=np.float32)])
        cases.add(Case("the picture and noise", "shape"), {"clip_input": both, "images": np.repeat(picture, 2, axis=0)})
    _both(cases, module, FORWARD[submodel], lambda: progress(f"reference: {submodel} in fp16"))
    return cases


def _both(cases: Cases, module: Any, forward: Forward, between: Callable[[], None]) -> None:
    run_cases(cases, "float32", module, forward)
    between()
    module.half()
    with quick_halves(module):
        run_cases(cases, "float16", module, forward)


def _sample_pictures(pipeline: Any, selection: Selection, out: Path) -> None:
    """Pictures of the sample's own evaluation set, for its measure of meaning."""
    import numpy as np
    import torch

    from sdflow.samples import prompts

    cases = prompts.evaluation_set()[: selection.sample_cases]
    pictures = pipeline(
        [case.prompt for case in cases],
        latents=torch.from_numpy(np.stack([prompts.first_latents(case.seed) for case in cases])),
        num_inference_steps=selection.sample_steps,
        guidance_scale=selection.guidance_scale,
        output_type="np",
    ).images
    np.savez(out / SAMPLE_FILE, float32=pictures)
