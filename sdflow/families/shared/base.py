"""`Family`: composes models into a kind of pipeline and turns prompts into denoiser inputs.

A family declares its submodels, where they are stored, their companions, and how diffusers runs them. It knows nothing of
passes, the cache or sessions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import UsageError
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.colors import LatentColors
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import DIFFUSION, Noising
from sdflow.families.shared.part import Companion, Part
from sdflow.families.shared.references import References
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.models.base import Config, halved
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

ONNX_COMPONENT = ["diffusers", "OnnxRuntimeModel"]
"""The entry for a folder with an ONNX graph in model_index.json."""


class Family:
    """A kind of pipeline. Subclasses set the class variables and implement the methods that raise NotImplementedError.

    name: in manifests. title: for display. classes: supported diffusers pipelines in model_index.json. lacks: components of
    these classes that its pipelines do not have.
    denoiser, decoder, encoder, checker: names of parts; the checker may be None. companions: tokenizers, schedulers, ...
    net: a part that may occur any number of times, each under its own name (a ControlNet), or None.
    prompter: the part that encodes image prompts for IP-Adapters, or None.
    references: how its denoiser reads reference images, or None.
    length_arguments: call arguments that change the number of text tokens. of_one_length: tokenizers whose tokens the denoiser
    reads side by side, so they must produce equal lengths. texts_vary: the number of text tokens depends on the prompts.
    guidance_offset: what is added to a call's guidance scale to give the weight of the prompt in classifier-free guidance,
    because diffusers' pipelines differ in what they call the scale.
    noising: the noise process (`sdflow.families.shared.noising`). scheduler_config: entries that diffusers' pipeline sets in
    the scheduler's config. options: entries of model_index.json that affect the computation, with diffusers' defaults.
    arguments: family-specific call arguments, by name.
    reference_arguments: arguments of a call of diffusers' pipeline whose defaults differ from this family's.
    verified_guidance: the scale that guided images are verified with, which keys of verdicts hold; None: the default.
    embeddings: the outputs of diffusers' `encode_prompt`, in order, as arguments of its call that replace prompts.
    assembled_as: the class in an assembled model_index.json, by `task`.
    architectures: shipped ones, by name; the first is the default. relatives: how a name begins in a file of a denoiser like its
    own in a size that none of them has -> what that file is. strength_spreads: whether image to image spreads all steps
    over the part that the strength leaves, if the scheduler supports it, rather than skipping steps. defaults: call arguments
    per task, from the signatures of diffusers' pipelines. colors: RGB factors of the latents, for previews; None if unpublished.
    quantizing: pass -> its options for the denoiser, for passes that were measured with it (docs/quantization.md).
    """

    name: str
    title: str
    classes: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    parts: tuple[Part, ...]
    denoiser: str
    decoder: str
    encoder: str
    checker: str | None
    net: Part | None = None
    prompter: Part | None = None
    references: ClassVar[References | None] = None
    companions: ClassVar[Mapping[str, Companion]]
    scheduler_config: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    arguments: ClassVar[Mapping[str, Parameter]] = {}
    length_arguments: tuple[str, ...] = ()
    of_one_length: tuple[str, ...] = ("tokenizer", "tokenizer_2")
    texts_vary: bool = False
    guidance_offset: float = 0.0
    noising: ClassVar[Noising] = DIFFUSION
    strength_spreads: bool = False
    defaults: ClassVar[Mapping[Task, Defaults]]
    reference_arguments: ClassVar[Mapping[str, Any]] = {}
    verified_guidance: float | None = None
    embeddings: tuple[str, ...]
    colors: ClassVar[LatentColors | None] = None
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    relatives: tuple[tuple[str, str], ...] = ()
    assembled_as: ClassVar[Mapping[Task, str]]
    architectures: ClassVar[Mapping[str, Architecture]]

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        """Tensor name -> shape in a file in the original layout, which together identify the architecture with these configs
        (by component). None: the tensor must be absent."""
        raise NotImplementedError

    def title_of(self, configs: Mapping[str, Config]) -> str:
        """Display name including the generation that these configs (by part) belong to."""
        return self.title

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        """The base workflow (in the family's `workflows/base`, without suffix) with the pass chains for these configs, by
        part. Its name is the family's unless overridden."""
        return self.name

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """Denoiser inputs for a request: tokenizes, runs text encoders, adds other conditions. companions: loaded, by name."""
        raise NotImplementedError

    def lora_loader(self) -> Any:
        """The diffusers class that reads LoRA files and loads them into modules: the first of `classes` unless overridden."""
        import diffusers

        return getattr(diffusers, self.classes[0])

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        """The factors of a LoRA file (kohya's or diffusers' names) under diffusers' names, and how many of the file's layers,
        of two factors each, they cover. denoiser: its config. Raises KeyError for a module that does not exist."""
        found = self.lora_loader().lora_state_dict(dict(tensors), unet_config=SimpleNamespace(**denoiser))[0]
        return found, len(found) // 2

    def load_lora(self, tensors: Mapping[str, torch.Tensor], module: Any, adapter: str, **options: Any) -> None:
        """Load LoRA factors into the denoiser module under an adapter name."""
        self.lora_loader().load_lora_into_unet(dict(tensors), None, module, adapter, **options)

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        """diffusers' own pipeline with these modules (by component), the reference for sdflow's. Components may be missing:
        text encoders if prompts are already encoded, all others if prompts are only to be encoded."""
        return self.lora_loader()(
            **{name: modules.get(name) for name in self.components},
            **{name: companions.get(name) for name in self.companions},
            **{name: options.get(name, default) for name, default in self.options.items()},
        )

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        """Prompts (without negative prompts) encoded by diffusers' pipeline, as arguments of its call (`embeddings`).

        pipeline: from `torch_pipeline`, with text encoders. configs: by part. more: further arguments of `encode_prompt`.
        """
        found = pipeline.encode_prompt(
            list(prompts), device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=guided, **more
        )
        return {name: value for name, value in zip(self.embeddings, found, strict=True) if value is not None}

    def task(self, configs: Mapping[str, Config]) -> Task:
        """The task that a pipeline with these configs (by part) is made for; "text" covers the others too. Inpainting
        denoisers take a mask and the masked image's latents as additional channels."""
        denoiser = configs.get(self.denoiser, {})
        latents, channels = (denoiser.get(name) for name in ("out_channels", "in_channels"))
        return "inpaint" if latents is not None and channels == 2 * latents + 1 else "text"

    def needed(self, configs: Mapping[str, Config]) -> tuple[str, ...]:
        """The parts that a pipeline with these configs requires for drawing."""
        return self.drawing if self.task(configs) == "text" else (*self.drawing, self.encoder)

    def require_nets_fit(self, configs: Mapping[str, Config]) -> None:
        """Raises UsageError for ControlNets with an inpainting denoiser."""
        if (nets := self.nets(configs)) and self.task(configs) == "inpaint":
            raise UsageError(
                "inpainting models do not support ControlNets here",
                where=next(iter(nets)),
                remedy="Use them with the text-to-image model, which can also inpaint (--mask).",
            )

    def part(self, name: str) -> Part:
        """The part with this name, including ControlNets and the image prompt encoder. Raises KeyError."""
        if self.net is not None and name.startswith(f"{self.net.name}_"):
            return replace(self.net, name=name, component=name, repeats=self.net.name)
        if self.prompter is not None and name == self.prompter.name:
            return self.prompter
        return {part.name: part for part in self.parts}[name]

    def net_name(self, name: str) -> str:
        """The submodel name of a ControlNet from its name in workflows and calls."""
        assert self.net is not None, "a family with ControlNets"
        return f"{self.net.name}_{name}"

    def nets(self, submodels: Iterable[str]) -> dict[str, str]:
        """The ControlNets among these submodels, sorted: name in workflows and calls -> submodel name."""
        begins = None if self.net is None else f"{self.net.name}_"
        return {} if begins is None else {
            name.removeprefix(begins): name for name in sorted(submodels) if name.startswith(begins)
        }  # fmt: skip

    def prompters(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """The image prompt encoder among these submodels: one name or none."""
        return tuple(name for name in submodels if self.prompter is not None and name == self.prompter.name)

    def optional_parts(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """The submodels among these that exist only on request: image prompt encoder and ControlNets."""
        there = set(submodels)
        return (*self.prompters(there), *self.nets(there).values())

    def ordered(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """The submodels of this family among these names, in the family's order."""
        there = set(submodels)
        return (*(name for name in self.submodels if name in there), *self.optional_parts(there))

    def require_arguments(self, given: Mapping[str, Any], prompts: int) -> None:
        """Raises UsageError, with the argument's name as `where`, for an argument that this family does not take or a value
        that is invalid. A text is one for all prompts, or a list of one for each. prompts: the number of prompts in the
        call."""
        if unknown := sorted(set(given) - set(self.arguments)):
            takes = f"it takes {', '.join(self.arguments)}" if self.arguments else "it takes none"
            raise UsageError(
                f"{self.title} has no argument {unknown[0]}",
                where=unknown[0],
                remedy=f"Besides the common ones, {takes}.",
            )
        for name, value in given.items():
            parameter = self.arguments[name]
            if parameter.kind is not str or not isinstance(value, list | tuple):
                parameter.require(name, value)
            elif value and len(value) != prompts:
                raise UsageError(
                    f"{len(value)} texts for {prompts} prompts", where=name, remedy="Pass one for each, or one for all."
                )

    @property
    def submodels(self) -> tuple[str, ...]:
        """The names of its parts, in order."""
        return tuple(part.name for part in self.parts)

    @property
    def drawing(self) -> tuple[str, ...]:
        """The parts that text to image requires."""
        optional = {part.name for part in self.parts if part.optional}
        return tuple(name for name in self.submodels if name != self.encoder and name not in optional)

    def drawing_of(self, submodels: Container[str]) -> tuple[str, ...]:
        """The parts among these submodels that text to image runs, including optional text encoders."""
        return tuple(name for name in self.submodels if name in self.drawing or name in self.text_of(submodels))

    @property
    def text(self) -> tuple[str, ...]:
        """The text encoders, including optional ones."""
        others = (self.denoiser, self.decoder, self.encoder, self.checker)
        return tuple(name for name in self.submodels if name not in others)

    def text_of(self, submodels: Container[str]) -> tuple[str, ...]:
        """The text encoders among these submodels."""
        return tuple(name for name in self.text if name in submodels)

    @property
    def with_loras(self) -> tuple[str, ...]:
        """The parts that LoRAs can modify."""
        return tuple(part.name for part in self.parts if part.lora)

    @property
    def exchangeable(self) -> tuple[str, ...]:
        """Components that a workflow may replace with any that has the same inputs and outputs: those without companions that
        would have to be replaced with them, as tokenizers with text encoders."""
        return (self.part(self.decoder).component, self.part(self.denoiser).component)

    @property
    def exchangeable_texts(self) -> tuple[str, ...]:
        """Text encoders that a workflow may replace with one of the same vocabulary: the tokenizers stay."""
        return tuple(dict.fromkeys(self.part(name).component for name in self.text))

    @property
    def omittable(self) -> tuple[str, ...]:
        """Components that a checkpoint may lack and a workflow may omit."""
        return tuple(part.component for part in self.parts if part.optional)

    @property
    def components(self) -> dict[str, tuple[Part, ...]]:
        """Component -> its parts, in order."""
        found: dict[str, tuple[Part, ...]] = {}
        for part in self.parts:
            found[part.component] = (*found.get(part.component, ()), part)
        return found

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """Default call arguments for a model with these configs, by part: see `settled`."""
        return settled(self.defaults, configs[self.denoiser], scheduler, said)

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        """Sizes of the text token axes, by name, for texts of default length. configs: by part."""
        return {"sequence": max(int(configs[name]["max_position_embeddings"]) for name in self.text_of(configs))}

    def reference_arguments_of(self, configs: Mapping[str, Config]) -> Mapping[str, Any]:
        """`reference_arguments` for a pipeline with these configs, by part."""
        return self.reference_arguments

    def guidance_width(self, configs: Mapping[str, Config]) -> int | None:
        """Width of the guidance embedding that the denoiser takes; None if it takes none."""
        width = configs[self.denoiser].get("time_cond_proj_dim")
        return None if width is None else int(width)

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        """Whether classifier-free guidance applies: two denoiser rows per image."""
        return self.guidance_weight(scale) > 1 and self.guidance_width(configs) is None

    def text_rows(self, configs: Mapping[str, Config], scale: float) -> int:
        """How many rows text encoders run at once: the negative prompt with the prompt, where this guidance scale applies."""
        return 2 if self.guided(configs, scale) else 1

    def guidance_weight(self, scale: float) -> float:
        """The weight of the prompt in classifier-free guidance at this guidance scale: none - weight * (none - prompt). No
        guidance at 1 or below."""
        return scale + self.guidance_offset

    def packed(self, latents: Any) -> Any:
        """Latents (images, channels, rows, columns) in the form that diffusers' pipeline call takes."""
        return latents

    def input_channels(self, configs: Mapping[str, Config]) -> int:
        """Input channels of the denoiser, including those for a mask. Raises KeyError for an incomplete config."""
        return int(configs[self.denoiser]["in_channels"])

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        """Properties of the pipeline's latents. configs: by part. Raises KeyError or TypeError for an incomplete config."""
        denoiser = configs[self.denoiser]
        return Latents.of(denoiser, configs[self.decoder], multiple=halved(denoiser))
