"""What a family is made of: its submodels, where they lie in files, and what lies beside their graphs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from sdflow.models.base import Config, Model, Original, Ports, class_names


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
    own. layout: how they lie there. entry: of the part's config, what sdflow adds to the checkpoint's: one value per adapter.
    """

    of: Callable[[str], int | None]
    layout: Layout
    entry: str


@dataclass(frozen=True)
class Part:
    """One submodel of a family.

    name: as in workflows and keys. component: the checkpoint's folder. about: for the workflow's schema.
    optional: a checkpoint may lack it. read: the outputs that drawing reads, by its config; None: all. layouts: where it lies in
    files in the original layout; the first whose prefix a file has. lora: how its tensors' names begin in LoRA files.
    unmerged: the same, of a part whose LoRAs are refused. whole: clip_skip leaves out none of its layers.
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
    unmerged: tuple[str, ...] = ()
    whole: bool = False
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

    def ports(self, config: Config) -> Ports:
        """The inputs and outputs of its graph, of the model that this config.json names."""
        return self.of(config).model.ports(config)

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
    parts: it is there only beside one of these parts; none: always. shipped: sdflow has the published one for files that hold
    weights alone; else it has a stand-in, for random weights.
    """

    library: str
    class_name: str | None
    file: str
    parts: tuple[str, ...] = ()
    shipped: bool = True

    def wanted(self, submodels: Container[str]) -> bool:
        """Whether it is there beside these submodels."""
        return not self.parts or any(part in submodels for part in self.parts)
