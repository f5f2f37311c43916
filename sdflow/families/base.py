"""What a family is: data that composes models to a pipeline, and how a prompt becomes what the denoiser takes.

A family says which models lie in which folders, what lies beside them, and how diffusers runs them. It knows nothing of
passes, the cache or sessions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import UsageError
from sdflow.families.colors import LatentColors
from sdflow.families.defaults import Defaults, Task, settled
from sdflow.families.latents import Latents
from sdflow.families.noising import DIFFUSION, Noising
from sdflow.families.part import Companion, Part
from sdflow.families.request import Conditions, Request, Run
from sdflow.models.base import Config, halved

if TYPE_CHECKING:
    import torch

ONNX_COMPONENT = ["diffusers", "OnnxRuntimeModel"]
"""What model_index.json calls a folder with an ONNX graph, in every family."""


class Family:
    """A kind of pipeline. Subclasses set the class variables and the methods that raise here.

    name: in manifests. title: for people. classes: diffusers' pipelines in model_index.json that it reads. lacks: components
    of these classes that its pipelines do not have.
    denoiser, decoder, encoder, checker: names of parts; the checker may be None. companions: what lies beside.
    net: a part that may be there any number of times, each with a name of its own: a ControlNet. None: there are none.
    prompter: the part that reads image prompts, where a pipeline has IP-Adapters. None: there are none.
    length_arguments: those of them that change how many tokens texts have. of_one_length: the tokenizers whose tokens the
    denoiser reads side by side, as one: they make the same number of a text. noising: how its latents become noise
    (`sdflow.families.noising`).
    scheduler_config: what diffusers' pipeline sets in the scheduler's config. options: entries of model_index.json that
    change what is computed, with diffusers' defaults. arguments: of a call, beside those of all families.
    embeddings: what `encode_prompt` of diffusers' pipeline gives, in order: arguments that its call takes in place of
    prompts. assembled_as: the class in an assembled model_index.json, by what the pipeline is made for (`task`).
    architectures: shipped ones, the first is the usual one. strength_spreads: the steps from an image are spread over what
    its strength leaves, where the scheduler can; else some are left out. defaults: of a call for each task, as in the
    signatures of diffusers' pipelines. colors: of its latents, for previews; None: nobody has published any.
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
    companions: ClassVar[Mapping[str, Companion]]
    scheduler_config: ClassVar[Mapping[str, Any]]
    options: ClassVar[Mapping[str, Any]]
    arguments: tuple[str, ...]
    length_arguments: tuple[str, ...] = ()
    of_one_length: tuple[str, ...] = ("tokenizer", "tokenizer_2")
    noising: ClassVar[Noising] = DIFFUSION
    strength_spreads: bool = False
    defaults: ClassVar[Mapping[Task, Defaults]]
    embeddings: tuple[str, ...]
    colors: ClassVar[LatentColors | None] = None
    assembled_as: ClassVar[Mapping[Task, str]]
    architectures: tuple[str, ...]

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        """Tensors of a file in the original layout whose shapes together say which architecture it is: those of these
        configs, by component. None: of a tensor that must not be there."""
        raise NotImplementedError

    def title_of(self, configs: Mapping[str, Config]) -> str:
        """For people, as `title`: the generation that these configs, by part, are of."""
        return self.title

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        """The workflow in workflows/base, without its suffix, that has the chains for the generation that these configs, by
        part, are of."""
        raise NotImplementedError

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """Tokenize, encode, add what else the denoiser takes. companions: loaded, by name."""
        raise NotImplementedError

    def lora_loader(self) -> Any:
        """diffusers' class whose class methods read LoRA files and load them into modules."""
        raise NotImplementedError

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        """The factors of a LoRA file, kohya's names or diffusers', under the names that diffusers has for them; and how many of
        the file's layers, of two factors each, these are. denoiser: its config. Raises KeyError for a module that it has not."""
        found = self.lora_loader().lora_state_dict(dict(tensors), unet_config=SimpleNamespace(**denoiser))[0]
        return found, len(found) // 2

    def load_lora(self, tensors: Mapping[str, torch.Tensor], module: Any, adapter: str, **options: Any) -> None:
        """Inject such factors into a denoiser's module."""
        self.lora_loader().load_lora_into_unet(dict(tensors), None, module, adapter, **options)

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        """diffusers' own pipeline of these modules, by component: what sdflow's are held to. It lacks those that are not
        given: the text encoders where prompts come encoded, the others where prompts are only to be encoded."""
        raise NotImplementedError

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool
    ) -> dict[str, Any]:
        """What diffusers' pipeline makes of prompts, without negative ones, as arguments of its call (`embeddings`).
        pipeline: as of `torch_pipeline`, with its text encoders. configs: by part."""
        found = pipeline.encode_prompt(
            list(prompts), device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=guided
        )
        return {name: value for name, value in zip(self.embeddings, found, strict=True) if value is not None}

    def task(self, configs: Mapping[str, Config]) -> Task:
        """What a pipeline of these configs, by part, is made for; one that is made for text does the others too. A denoiser
        for inpainting takes a mask and the latents of the masked image beside its latents."""
        denoiser = configs.get(self.denoiser, {})
        latents, channels = (denoiser.get(name) for name in ("out_channels", "in_channels"))
        return "inpaint" if latents is not None and channels == 2 * latents + 1 else "text"

    def needed(self, configs: Mapping[str, Config]) -> tuple[str, ...]:
        """The parts that a pipeline of these configs cannot draw without."""
        return self.drawing if self.task(configs) == "text" else (*self.drawing, self.encoder)

    def require_nets_fit(self, configs: Mapping[str, Config]) -> None:
        """Raises UsageError for ControlNets beside a denoiser that is not given latents alone, as they are."""
        if (nets := self.nets(configs)) and self.task(configs) == "inpaint":
            raise UsageError(
                "a model for inpainting takes no ControlNets here",
                where=next(iter(nets)),
                remedy="Take them with the model for text to image: with --mask it draws into a mask too.",
            )

    def part(self, name: str) -> Part:
        """The part of this name, the ControlNet, or what reads image prompts. Raises KeyError."""
        if self.net is not None and name.startswith(f"{self.net.name}_"):
            return replace(self.net, name=name, component=name, repeats=self.net.name)
        if self.prompter is not None and name == self.prompter.name:
            return self.prompter
        return {part.name: part for part in self.parts}[name]

    def net_name(self, name: str) -> str:
        """The submodel that a ControlNet is which workflows and calls name so."""
        assert self.net is not None, "a family with ControlNets"
        return f"{self.net.name}_{name}"

    def nets(self, submodels: Iterable[str]) -> dict[str, str]:
        """The ControlNets among submodels, in order: what workflows and calls name them -> submodel."""
        begins = None if self.net is None else f"{self.net.name}_"
        return {} if begins is None else {
            name.removeprefix(begins): name for name in sorted(submodels) if name.startswith(begins)
        }  # fmt: skip

    def prompters(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """What reads image prompts among submodels: one name, or none."""
        return tuple(name for name in submodels if self.prompter is not None and name == self.prompter.name)

    def optional_parts(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """Those of these names that are there only where a workflow asks for them: what reads image prompts, ControlNets."""
        there = set(submodels)
        return (*self.prompters(there), *self.nets(there).values())

    def ordered(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """Those of these names that are submodels of this family, in its order."""
        there = set(submodels)
        return (*(name for name in self.submodels if name in there), *self.optional_parts(there))

    def require_arguments(self, given: Mapping[str, Any], prompts: int) -> None:
        """Raises UsageError, `where` the argument's name, for one of a call that this family does not know, and for a value
        that it cannot have. prompts: how many the call has."""
        if unknown := sorted(set(given) - set(self.arguments)):
            takes = f"it takes {', '.join(self.arguments)}" if self.arguments else "it takes none"
            raise UsageError(
                f"{self.title} knows no {unknown[0]}", where=unknown[0], remedy=f"Besides the common ones {takes}."
            )

    @property
    def submodels(self) -> tuple[str, ...]:
        """The names of its parts, in order."""
        return tuple(part.name for part in self.parts)

    @property
    def drawing(self) -> tuple[str, ...]:
        """The parts that text to image cannot do without."""
        optional = {part.name for part in self.parts if part.optional}
        return tuple(name for name in self.submodels if name != self.encoder and name not in optional)

    def drawing_of(self, submodels: Container[str]) -> tuple[str, ...]:
        """The parts of a pipeline of these submodels that text to image runs: with the text encoders that a checkpoint
        may lack."""
        return tuple(name for name in self.submodels if name in self.drawing or name in self.text_of(submodels))

    @property
    def text(self) -> tuple[str, ...]:
        """The parts that read the prompt, those that a checkpoint may lack among them."""
        others = (self.denoiser, self.decoder, self.encoder, self.checker)
        return tuple(name for name in self.submodels if name not in others)

    def text_of(self, submodels: Container[str]) -> tuple[str, ...]:
        """Those of them that are among these submodels."""
        return tuple(name for name in self.text if name in submodels)

    @property
    def with_loras(self) -> tuple[str, ...]:
        """The parts that LoRAs change."""
        return tuple(part.name for part in self.parts if part.lora)

    @property
    def exchangeable(self) -> tuple[str, ...]:
        """The components that a workflow may take from elsewhere. Nothing lies beside them that would have to be exchanged
        too, as tokenizers do beside text encoders."""
        return (self.part(self.decoder).component, self.part(self.denoiser).component)

    @property
    def omittable(self) -> tuple[str, ...]:
        """The components that a checkpoint may lack, so that a workflow may leave them out."""
        return tuple(part.component for part in self.parts if part.optional)

    @property
    def components(self) -> dict[str, tuple[Part, ...]]:
        """Component -> the parts that are made of it, in order."""
        found: dict[str, tuple[Part, ...]] = {}
        for part in self.parts:
            found[part.component] = (*found.get(part.component, ()), part)
        return found

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """What a call of a model with these configs, by part, takes where the caller says nothing: `settled`."""
        return settled(self.defaults, configs[self.denoiser], scheduler, said)

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        """The sizes of the axes of text tokens, by name, for texts of the usual length. configs: by part."""
        return {"sequence": max(int(configs[name]["max_position_embeddings"]) for name in self.text_of(configs))}

    def guidance_width(self, configs: Mapping[str, Config]) -> int | None:
        """Of the embedding in which the denoiser takes the guidance scale; None where it takes none."""
        width = configs[self.denoiser].get("time_cond_proj_dim")
        return None if width is None else int(width)

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        """Whether there is classifier-free guidance: each image then takes two rows of the denoiser."""
        return scale > 1 and self.guidance_width(configs) is None

    def packed(self, latents: Any) -> Any:
        """Latents, a tensor (images, channels, rows, columns), as the call of diffusers' pipeline takes them."""
        return latents

    def input_channels(self, configs: Mapping[str, Config]) -> int:
        """Of what the denoiser takes: its latents, and what a mask adds. Raises KeyError for a config that lacks something."""
        return int(configs[self.denoiser]["in_channels"])

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        """configs: by part. Raises KeyError or TypeError for one that lacks something."""
        denoiser = configs[self.denoiser]
        return Latents.of(denoiser, configs[self.decoder], multiple=halved(denoiser))
