"""Components of a family: submodels, their locations in files, and companions such as tokenizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sdflow.models.base import Config, Model, Original, class_names
from sdflow.models.ports import Ports


@dataclass(frozen=True)
class Layout:
    """Location of a part in a file in the original layout (CompVis, SGM).

    prefix: of its tensor names. names: maps state_dict keys to locations without the prefix; None: the model's own mapping.
    unused(name, keys): whether a tensor under the prefix has no counterpart among the module's keys and can be ignored.
    """

    prefix: str
    names: Callable[[Iterable[str]], dict[str, Original]] | None = None
    unused: Callable[[str, Iterable[str]], bool] = lambda name, keys: False


@dataclass(frozen=True)
class Adapted:
    """Parameters of a part that are stored in adapter files.

    of: index of the adapter that holds a parameter; None: the part's own checkpoint. layout: their location in adapter files.
    entry: the config entry that sdflow adds, with one value per adapter.
    """

    of: Callable[[str], int | None]
    layout: Layout
    entry: str


@dataclass(frozen=True)
class Part:
    """One submodel of a family.

    name: as in workflows and cache keys. component: its folder in a checkpoint. about: description in the workflow schema.
    optional: a checkpoint may omit it. read(config): outputs that drawing uses; None: all. layouts: locations in files in the
    original layout; the first whose prefix occurs in a file applies. lora: prefixes of its tensors in LoRA files.
    unmerged: likewise, for a part whose LoRAs are rejected. whole: clip_skip does not apply.
    config: config entries that sdflow sets, which select the graph's outputs. embedding: name of its tensor in textual inversion
    files that hold one per text encoder. controlled: like config, for pipelines with ControlNets.
    repeats: the common name of parts that may occur several times (`Family.net`), else "".
    options: entries of model_index.json (`Family.options`) that sdflow keeps in its config, because they decide how it is run.
    instead: alternative models for its component, selected by config.json (`of`). adapted: its parameters in IP-Adapter files.
    """

    name: str
    model: Model
    component: str
    about: str
    optional: bool = False
    read: Callable[[Config], tuple[str, ...]] | None = None
    layouts: tuple[Layout, ...] = ()
    lora: tuple[str, ...] = ()
    unmerged: tuple[str, ...] = ()
    whole: bool = False
    config: Config = field(default_factory=dict)
    embedding: str | None = None
    controlled: Config = field(default_factory=dict)
    repeats: str = ""
    options: tuple[str, ...] = ()
    instead: tuple[Model, ...] = ()
    adapted: Adapted | None = None

    def of(self, config: Config) -> Part:
        """This part with the model whose class the config.json names."""
        named = class_names(config)
        model = next((model for model in self.instead if model.class_name in named), None)
        return self if model is None else replace(self, model=model)

    def ports(self, config: Config) -> Ports:
        """Inputs and outputs of its graph, for the model that the config.json names."""
        return self.of(config).model.ports(config)

    @property
    def kind(self) -> str:
        """Its name in pass chains and cache keys: `repeats` if set, else `name`."""
        return self.repeats or self.name

    def layout(self, prefix: str) -> Layout:
        """The layout with this prefix; for a file that holds only this part (""), the first layout without its prefix."""
        return next((layout for layout in self.layouts if layout.prefix == prefix), replace(self.layouts[0], prefix=""))


@dataclass(frozen=True)
class Companion:
    """A tokenizer, scheduler or feature extractor that accompanies the graphs.

    library, class_name: what loads it; class_name None: named by its config. module: the library's that defines the
    class; "": the library itself. file: required in its folder. parts: present only with one of these parts; empty:
    always. shipped: sdflow ships the published one for weights-only files; otherwise it ships a stand-in for random
    weights only.
    """

    library: str
    class_name: str | None
    file: str
    parts: tuple[str, ...] = ()
    shipped: bool = True
    module: str = ""

    def wanted(self, submodels: Container[str]) -> bool:
        """Whether a pipeline of these submodels has it."""
        return not self.parts or any(part in submodels for part in self.parts)

    def load(self, folder: Path, config: Config) -> Any:
        """Load it from its folder. config: that of its file. Raises AttributeError for a class that the installed library
        lacks, UsageError where a package is missing that a scheduler needs, and the library's errors."""
        if self.class_name is not None:
            module = import_module(f"{self.library}.{self.module}" if self.module else self.library)
            return getattr(module, self.class_name).from_pretrained(str(folder), local_files_only=True)
        from sdflow.families.shared.schedulers import from_config, scheduler_class

        return from_config(scheduler_class(str(config["_class_name"])), config)


CLIP_TOKENIZER = Companion(
    "transformers", "CLIPTokenizer", "tokenizer_config.json", module="models.clip.tokenization_clip"
)
