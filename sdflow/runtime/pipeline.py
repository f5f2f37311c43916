"""Text to image over ONNX Runtime sessions, with diffusers' schedulers and the interface of a diffusers pipeline.

The plain loop: one session run per step, tensors through host memory. It computes what
`diffusers.StableDiffusionPipeline.__call__` (0.42) computes, and is the measure for anything faster.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdflow.artifact import CONFIG_FILE, MODEL_FILE
from sdflow.errors import UsageError, VerificationError
from sdflow.passes.base import SUBMODELS
from sdflow.runtime.sessions import Shapes, create_session, numpy_type
from sdflow.targets import TARGETS, Target

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime
    import torch
    from PIL.Image import Image

REQUIRED = ("text_encoder", "unet", "vae_decoder")
"""The submodels that text to image cannot do without."""


@dataclass(frozen=True)
class Images:
    """What a pipeline draws. images: PIL images, or float32 NHWC in [0, 1]; nsfw_content_detected: one per image."""

    images: list[Image] | np.ndarray
    nsfw_content_detected: list[bool] | None


class Submodel:
    """A session that takes and gives numpy arrays by name; inputs are cast to the types that the graph declares."""

    def __init__(self, session: onnxruntime.InferenceSession, config: Mapping[str, Any]) -> None:
        self.session = session
        self.config = config
        self.input_types = {value.name: numpy_type(value) for value in session.get_inputs()}
        self.output_names = [value.name for value in session.get_outputs()]

    def __call__(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        if inputs.keys() != self.input_types.keys():
            raise VerificationError(
                f"the graph takes {', '.join(self.input_types)}, not {', '.join(inputs)}",
                remedy="Only the architectures of Stable Diffusion 1.x and 2.x are supported.",
            )
        cast = {name: value.astype(self.input_types[name], copy=False) for name, value in inputs.items()}
        return dict(zip(self.output_names, self.session.run(None, cast), strict=True))


class TextToImagePipeline:
    """Draws pictures from a pipeline folder: `TextToImagePipeline.load(folder, "cpu")("a horse").images[0]`."""

    def __init__(
        self,
        submodels: Mapping[str, Submodel],
        tokenizer: Any,
        scheduler: Any,
        feature_extractor: Any = None,
    ) -> None:
        if missing := [name for name in REQUIRED if name not in submodels]:
            raise UsageError(f"the pipeline has no {', '.join(missing)}")
        self.submodels = submodels
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.feature_extractor = feature_extractor
        vae = submodels["vae_decoder"].config
        self.vae_scale = 2 ** (len(vae["block_out_channels"]) - 1)
        self.scaling_factor = float(vae["scaling_factor"])
        # PyTorch's UNet also takes sizes that do not halve evenly; a traced graph doubles whatever it has halved.
        self.granularity = self.vae_scale * 2 ** (len(submodels["unet"].config["block_out_channels"]) - 1)

    @classmethod
    def load(
        cls,
        folder: Path,
        target: str | Target,
        *,
        shapes: Mapping[str, Shapes] | None = None,
        engine_cache: Path | None = None,
        threads: int | None = None,
    ) -> TextToImagePipeline:
        """Load an assembled pipeline. `shapes`: submodel -> its inputs' shapes, for targets with static shapes.

        Raises UsageError when the folder is no pipeline, TargetUnavailableError when the provider is not there.
        """
        target = TARGETS[target] if isinstance(target, str) else target
        submodels = {
            name: load_submodel(
                folder, name, target, shapes=(shapes or {}).get(name), engine_cache=engine_cache, threads=threads
            )
            for name in onnx_submodels(folder)
            if name != "vae_encoder"
        }
        return cls(submodels, **load_companions(folder))

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] = "",
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        eta: float = 0.0,
        generator: torch.Generator | None = None,
        latents: np.ndarray | None = None,
        output_type: Literal["pil", "np"] = "pil",
        callback_on_step_end: Callable[[int, int], None] | None = None,
    ) -> Images:
        """Draw one picture per prompt.

        height, width: pixels, multiples of 64 for Stable Diffusion; None for the model's own size. guidance_scale:
        above 1, each UNet run has batch 2 per picture, the negative prompt's half first. latents: (pictures, channels,
        height / 8, width / 8), standard normal; the generator draws them when None. callback_on_step_end: called with
        step index and timestep.
        Raises UsageError for sizes that the model cannot have.
        """
        import numpy as np
        import torch

        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
        guided = guidance_scale > 1
        embeddings = self.encode([*negatives, *prompts] if guided else prompts)

        shape = self.latents_shape(len(prompts), height, width)
        sample = torch.randn(shape, generator=generator) if latents is None else torch.from_numpy(latents.copy())
        if tuple(sample.shape) != shape:
            raise UsageError(f"latents of shape {tuple(sample.shape)}, expected {shape}")
        self.scheduler.set_timesteps(num_inference_steps)
        sample = sample.float() * self.scheduler.init_noise_sigma
        step_options = self._step_options(eta, generator)
        for index, timestep in enumerate(self.scheduler.timesteps):
            doubled = torch.cat([sample, sample]) if guided else sample
            noise = self.submodels["unet"](
                sample=self.scheduler.scale_model_input(doubled, timestep).numpy(),
                timestep=np.array([timestep.item()]),
                encoder_hidden_states=embeddings,
            )["out_sample"].astype(np.float32)
            if guided:
                unconditional, conditional = np.split(noise, 2)
                noise = unconditional + guidance_scale * (conditional - unconditional)
            sample = self.scheduler.step(torch.from_numpy(noise), timestep, sample, **step_options).prev_sample
            if callback_on_step_end is not None:
                callback_on_step_end(index, int(timestep))

        images = self.decode(sample.numpy())
        images, flagged = self.check_safety(images)
        return Images(images if output_type == "np" else to_pil(images), flagged)

    def encode(self, prompts: Sequence[str]) -> np.ndarray:
        """Text embeddings (prompts, 77, hidden size). A prompt beyond the model's length is cut, as in diffusers."""
        tokens = self.tokenizer(
            list(prompts),
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="np",
        )
        embeddings: np.ndarray = self.submodels["text_encoder"](input_ids=tokens.input_ids)["last_hidden_state"]
        return embeddings

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Pictures, float32 NHWC in [0, 1], from latents; one run of the decoder per picture."""
        import numpy as np

        decoder = self.submodels["vae_decoder"]
        decoded = [decoder(latent_sample=latent[None] / self.scaling_factor)["sample"] for latent in latents]
        images = np.concatenate(decoded).astype(np.float32)
        pixels: np.ndarray = np.clip(images / 2 + 0.5, 0, 1).transpose(0, 2, 3, 1)
        return pixels

    def check_safety(self, images: np.ndarray) -> tuple[np.ndarray, list[bool] | None]:
        """The pictures with the flagged ones blackened, and the flags; unchanged and None without a safety checker."""
        import numpy as np

        checker = self.submodels.get("safety_checker")
        if checker is None:
            return images, None
        clip_inputs = self.feature_extractor(to_pil(images), return_tensors="np").pixel_values
        checked = [checker(clip_input=clip_inputs[i : i + 1], images=images[i : i + 1]) for i in range(len(images))]
        flags = [bool(result["has_nsfw_concepts"].any()) for result in checked]
        return np.concatenate([result["out_images"] for result in checked]).astype(np.float32), flags

    def latents_shape(self, pictures: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """(pictures, channels, rows, columns) of the latents for a picture size in pixels."""
        config = self.submodels["unet"].config
        for name, size in (("height", height), ("width", width)):
            if size is not None and (size <= 0 or size % self.granularity):
                raise UsageError(f"{name} is {size} pixels", remedy=f"Take a multiple of {self.granularity}.")
        rows = config["sample_size"] if height is None else height // self.vae_scale
        columns = config["sample_size"] if width is None else width // self.vae_scale
        return pictures, int(config["in_channels"]), int(rows), int(columns)

    def _step_options(self, eta: float, generator: torch.Generator | None) -> dict[str, Any]:
        accepted = inspect.signature(self.scheduler.step).parameters
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}


def onnx_submodels(folder: Path) -> list[str]:
    """The submodels of a pipeline folder that hold an ONNX graph. Raises UsageError when there is no pipeline."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UsageError("there is no pipeline here: model_index.json is missing", where=str(folder))
    components: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
    return [name for name in SUBMODELS if components.get(name) == ["diffusers", "OnnxRuntimeModel"]]


def submodel_config(folder: Path, submodel: str) -> dict[str, Any]:
    """The config.json of one submodel."""
    config: dict[str, Any] = json.loads((folder / submodel / CONFIG_FILE).read_text(encoding="utf-8"))
    return config


def load_submodel(folder: Path, submodel: str, target: Target, **session_options: Any) -> Submodel:
    """One submodel of a pipeline folder on a target; the options are those of `create_session`."""
    session = create_session((folder / submodel / MODEL_FILE).resolve(), target, **session_options)
    return Submodel(session, submodel_config(folder, submodel))


def load_companions(folder: Path) -> dict[str, Any]:
    """Tokenizer, scheduler and, if there is one, feature extractor of a pipeline folder."""
    import diffusers
    from transformers import CLIPImageProcessor, CLIPTokenizer

    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    _, scheduler = index["scheduler"]
    if not hasattr(diffusers, scheduler):
        raise UsageError(f"diffusers {diffusers.__version__} has no scheduler {scheduler}", where=str(folder))
    extractor = folder / "feature_extractor"
    return {
        "tokenizer": CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        "scheduler": getattr(diffusers, scheduler).from_pretrained(folder / "scheduler"),
        "feature_extractor": CLIPImageProcessor.from_pretrained(extractor) if extractor.is_dir() else None,
    }


def to_pil(images: np.ndarray) -> list[Image]:
    """PIL images from float NHWC in [0, 1]."""
    from PIL import Image

    return [Image.fromarray(picture) for picture in (images * 255).round().astype("uint8")]
