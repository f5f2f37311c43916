"""What a family is: data that composes models to a pipeline, and how a prompt becomes what the denoiser takes.

A family says which models lie in which folders, what lies beside them, and how diffusers runs them. It knows nothing of
passes, the cache or sessions. Tensors are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import CheckpointError, UsageError
from sdflow.families.colors import LatentColors
from sdflow.families.defaults import Defaults, Task, settled
from sdflow.models.base import GUIDANCE, Config, Model, Original, class_names, halved
from sdflow.prompts.reading import PLAIN, Reading

if TYPE_CHECKING:
    import torch

ONNX_COMPONENT = ["diffusers", "OnnxRuntimeModel"]
"""What model_index.json calls a folder with an ONNX graph, in every family."""

Tensors = Mapping[str, "torch.Tensor"]
Run = Callable[[str, Tensors], Tensors]
"""Runs a submodel, by its name, on inputs by name; gives its outputs by name."""


@dataclass(frozen=True)
class Layout:
    """How a part lies in a file in the original layout (CompVis, SGM).

    prefix: of its tensors. names: state_dict key -> where it lies, without the prefix; None: the model's own.
    unused: tensors under the prefix that have no place in the module, given its keys.
    """

    prefix: str
    names: Callable[[Iterable[str]], dict[str, Original]] | None = None
    unused: Callable[[str, Iterable[str]], bool] = lambda name, keys: False


@dataclass(frozen=True)
class Adapted:
    """Parameters of a part that lie in the files of adapters. of: which adapter's file a parameter is in; None: the part's
    own. layout: how they lie there."""

    of: Callable[[str], int | None]
    layout: Layout


@dataclass(frozen=True)
class Part:
    """One submodel of a family.

    name: as in workflows and keys. component: the checkpoint's folder. about: for the workflow's schema.
    optional: a checkpoint may lack it. read: the outputs that drawing reads, by its config; None: all. layouts: where it lies in
    files in the original layout; the first whose prefix a file has. lora: how its tensors' names begin in LoRA files.
    config: entries of its config that are set on purpose; they choose the graph's outputs. embedding: name of its tensor in
    files of textual inversion that hold one for each text encoder. controlled: as config, where the pipeline has ControlNets.
    repeats: of one that may be there several times, what all of them are called (`Family.net`); else "".
    instead: models that its component may be of in its place: its config.json says which (`of`). adapted: what of it is in the
    files of IP-Adapters, where the pipeline has some.
    """

    name: str
    model: Model
    component: str
    about: str
    optional: bool = False
    read: Callable[[Config], tuple[str, ...]] | None = None
    layouts: tuple[Layout, ...] = ()
    lora: tuple[str, ...] = ()
    config: Config = field(default_factory=dict)
    embedding: str | None = None
    controlled: Config = field(default_factory=dict)
    repeats: str = ""
    instead: tuple[Model, ...] = ()
    adapted: Adapted | None = None

    def of(self, config: Config) -> Part:
        """This part, of the model whose class a config.json names."""
        named = class_names(config)
        model = next((model for model in self.instead if model.class_name in named), None)
        return self if model is None else replace(self, model=model)

    @property
    def kind(self) -> str:
        """What chains of passes and cache keys call it: its name, or that of all that are like it."""
        return self.repeats or self.name

    def layout(self, prefix: str) -> Layout:
        """The layout with this prefix; the first with none of it for "": in a file that holds this part alone."""
        return next((layout for layout in self.layouts if layout.prefix == prefix), replace(self.layouts[0], prefix=""))


@dataclass(frozen=True)
class Companion:
    """What lies beside the graphs: a tokenizer, a scheduler, a feature extractor.

    library, class_name: what loads it; class_name None: its config names it. file: what its folder must hold.
    parts: it is there only beside one of these parts; none: always.
    """

    library: str
    class_name: str | None
    file: str
    parts: tuple[str, ...] = ()

    def wanted(self, submodels: Container[str]) -> bool:
        """Whether it is there beside these submodels."""
        return not self.parts or any(part in submodels for part in self.parts)


@dataclass(frozen=True)
class Latents:
    """What a pipeline's latents are.

    channels: of the VAE. scale: image pixels per latent pixel, along each axis. multiple: rows and columns must be
    multiples of this: PyTorch's UNet also takes sizes that do not halve evenly, a traced graph doubles whatever it has
    halved. size: rows and columns of the model's own size. factor: latents are the VAE's times this.
    """

    channels: int
    scale: int
    multiple: int
    size: int
    factor: float

    @property
    def granularity(self) -> int:
        """Height and width of an image, in pixels, must be multiples of this."""
        return self.scale * self.multiple

    @property
    def image_size(self) -> int:
        """Height and width, in pixels, of the images that the model was made for."""
        return self.scale * self.size

    @classmethod
    def of(cls, denoiser: Config, vae: Config) -> Latents:
        """From config.json of a UNet and a VAE. Raises KeyError or TypeError for one that lacks something, CheckpointError
        for a size that is none."""
        scale = halved(vae)
        return cls(
            channels=int(vae["latent_channels"]),
            scale=scale,
            multiple=halved(denoiser),
            size=_side(denoiser["sample_size"]),
            factor=float(vae.get("scaling_factor", 0.18215)),
        )


MOST_LATENTS = 1 << 14
"""Rows and columns of latents that a config may name as its model's own size: 131,072 pixels."""


def _side(sample_size: Any) -> int:
    """diffusers takes one number, or two for height and width."""
    sides = set(sample_size) if isinstance(sample_size, list | tuple) and len(sample_size) == 2 else {sample_size}
    side = sides.pop() if len(sides) == 1 else None
    if type(side) is not int or not 0 < side <= MOST_LATENTS:
        raise CheckpointError(
            f"its sample_size is {sample_size!r:.40}",
            where="unet/config.json",
            remedy=f"Write the rows of the latents, 1 to {MOST_LATENTS}; they are as many as the columns.",
        )
    return side


@dataclass(frozen=True)
class Request:
    """What is drawn: one entry of `prompts` and `negatives` for each image.

    negatives: None where the caller gave none. guidance_scale: up to 1 there is no guidance. height, width: of the image
    in pixels. guidance_width: of the embedding in which the denoiser takes the guidance scale; None: it takes none.
    more: what only some families take (`Family.arguments`), each None where the caller did not say it. reading: how the
    texts are read.
    """

    prompts: Sequence[str]
    negatives: Sequence[str] | None
    guidance_scale: float
    height: int
    width: int
    guidance_width: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    reading: Reading = PLAIN

    @property
    def guided(self) -> bool:
        """Whether there is classifier-free guidance: each image then takes two rows, the negative prompts' first."""
        return self.guidance_scale > 1 and self.guidance_width is None

    def require_no_negatives(self) -> None:
        """Raises UsageError where the caller gave negative prompts; for a model that takes the guidance scale as an input."""
        if self.negatives is not None:
            raise UsageError(
                "this model knows no negative prompt: guidance is an input of its denoiser",
                where="negative_prompt",
                remedy="Leave it out.",
            )

    def guidance_inputs(self) -> dict[str, torch.Tensor]:
        """The guidance scale as an input of the denoiser, a row for each image, where it takes it so."""
        if self.guidance_width is None:
            return {}
        return {GUIDANCE: guidance_embedding(self.guidance_scale, self.guidance_width).repeat(len(self.prompts), 1)}


@dataclass(frozen=True)
class Conditions:
    """What the denoiser takes beside latents and timestep: a row for each image, twice as many with guidance, then the
    negative prompts' first. halves: 2 with guidance, else 1."""

    inputs: Tensors
    halves: int


class Family:
    """A kind of pipeline. Subclasses set the class variables and the methods that raise here.

    name: in manifests. title: for people. classes: diffusers' pipelines in model_index.json that it reads. lacks: components
    of these classes that its pipelines do not have.
    denoiser, decoder, encoder, checker: names of parts; the checker may be None. companions: what lies beside.
    net: a part that may be there any number of times, each with a name of its own: a ControlNet. None: there are none.
    prompter: the part that reads image prompts, where a pipeline has IP-Adapters. None: there are none.
    scheduler_config: what diffusers' pipeline sets in the scheduler's config. options: entries of model_index.json that
    change what is computed, with diffusers' defaults. arguments: of a call, beside those of all families.
    embeddings: what `encode_prompt` of diffusers' pipeline gives, in order: arguments that its call takes in place of
    prompts. assembled_as: the class in an assembled model_index.json, by what the pipeline is made for (`task`).
    architectures: shipped ones, the first is the usual one. strength_spreads: the steps from an image are spread over what
    its strength leaves, where the scheduler can; else some are left out. defaults: of a call for each task, as in the
    signatures of diffusers' pipelines. colors: of its latents, for previews.
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
    strength_spreads: bool = False
    defaults: ClassVar[Mapping[Task, Defaults]]
    embeddings: tuple[str, ...]
    colors: ClassVar[LatentColors]
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

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        """diffusers' own pipeline of these modules, by component: what sdflow's are held to. It lacks those that are not
        given: the text encoders where prompts come encoded, the others where prompts are only to be encoded."""
        raise NotImplementedError

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

    def beside(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """Those of these names that are there only where a workflow asks for them: what reads image prompts, ControlNets."""
        there = set(submodels)
        return (*self.prompters(there), *self.nets(there).values())

    def ordered(self, submodels: Iterable[str]) -> tuple[str, ...]:
        """Those of these names that are submodels of this family, in its order."""
        there = set(submodels)
        return (*(name for name in self.submodels if name in there), *self.beside(there))

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
        return tuple(name for name in self.submodels if name not in (self.encoder, self.checker))

    @property
    def text(self) -> tuple[str, ...]:
        """The parts that read the prompt."""
        return tuple(name for name in self.drawing if name not in (self.denoiser, self.decoder))

    @property
    def with_loras(self) -> tuple[str, ...]:
        """The parts that LoRAs change."""
        return tuple(part.name for part in self.parts if part.lora)

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

    def guidance_width(self, configs: Mapping[str, Config]) -> int | None:
        """Of the embedding in which the denoiser takes the guidance scale; None where it takes none."""
        width = configs[self.denoiser].get("time_cond_proj_dim")
        return None if width is None else int(width)

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        """Whether there is classifier-free guidance: each image then takes two rows of the denoiser."""
        return scale > 1 and self.guidance_width(configs) is None

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        """configs: by part. Raises KeyError or TypeError for one that lacks something."""
        return Latents.of(configs[self.denoiser], configs[self.decoder])


def guidance_embedding(scale: float, width: int) -> torch.Tensor:
    """(1, width): sines and cosines of a guidance scale. Above 1 is what guidance adds, as the paper counts it.

    After diffusers' StableDiffusionPipeline.get_guidance_scale_embedding; https://arxiv.org/abs/2310.04378, section 4.3.
    """
    import torch

    half = width // 2
    step = torch.log(torch.tensor(10000.0)) / (half - 1)  # in float32 throughout: angles are in the thousands
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
    excess = torch.as_tensor(scale - 1.0, dtype=torch.float32).reshape(1)  # a scale that is traced stays an input
    angles = (excess * 1000.0)[:, None] * frequencies[None]
    embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(embedding, (0, width - 2 * half))


def token_ids(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """(texts, length) of a CLIP tokenizer. A text beyond the model's length is cut, as in diffusers."""
    ids: torch.Tensor = tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids
