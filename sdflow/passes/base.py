"""What a pass is.

A pass reads a submodel's checkpoint or the artifact of the step before, and writes one artifact. It never sees the
cache. It runs in a process of its own (`sdflow.passes.worker`), so heavy imports belong inside `run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.families import DEFAULT, LIBRARY_MODULES
from sdflow.weights.lora import LoraInput

InputKind = Literal["checkpoint", "onnx"]


WEIGHTS_LAYER = ("sdflow.passes.bind_weights", "sdflow.weights.bind", "onnx", "onnxruntime")
GRAPH_LAYER = (
    "sdflow.weights.structure",
    "sdflow.passes.olive_pass",
    "onnx_ir",
    "torch.onnx.utils",
    "olive.package_config",
    "onnxruntime.transformers.optimizer",
)
MODULE_LAYER = ("sdflow.sources.load", *LIBRARY_MODULES)
BINDS = (WEIGHTS_LAYER,)
EDITS_GRAPH = (WEIGHTS_LAYER, GRAPH_LAYER)
TRACES = (WEIGHTS_LAYER, GRAPH_LAYER, MODULE_LAYER)
"""What `Pass.imports` may be. Importing these starts no thread that outlives it, and reads nothing but the installation."""


class PassConfig(BaseModel):
    """Options of a pass. Unknown options are errors; every default enters the cache key."""

    model_config = ConfigDict(extra="forbid", frozen=True)


C = TypeVar("C", bound=PassConfig)


@dataclass(frozen=True)
class PassInputs:
    """What a pass reads.

    model: the directory of the step before (`model.onnx`, ...), or None for the first step.
    checkpoint: how to load the submodel's PyTorch module (`sdflow.sources.load_module`), JSON; empty for later steps
        but BindWeights: their cache key knows nothing of the checkpoint, they find the architecture in `config.json`.
    family: the name of the submodel's family.
    loras: in the order of the workflow; empty unless the pass has `takes_loras`.
    base: for BindWeights, the artifact that the same step gives without LoRAs, where there is one.
    base_sha256: what its data file must have; None without a base.
    base_sums: what its pages must sum up to (`sdflow.weights.stream`); None where that is not known.
    progress: call it with a short phrase when a new phase begins.
    hashed: BindWeights calls it with the name and the SHA-256 of a file that it hashed while writing it.
    summed: BindWeights calls it with the sums of the pages of its data file, and of the base's if it hashed that.
    """

    submodel: str
    model: Path | None
    checkpoint: Mapping[str, Any]
    family: str = DEFAULT
    loras: tuple[LoraInput, ...] = ()
    base: Path | None = None
    base_sha256: str | None = None
    base_sums: str | None = None
    progress: Callable[[str], None] = field(default=lambda phrase: None)
    hashed: Callable[[str, str], None] = field(default=lambda name, sha256: None)
    summed: Callable[[str, str | None], None] = field(default=lambda sums, base_sums: None)


class Pass(ABC, Generic[C]):
    """One transformation. Subclasses set the class variables and `run`.

    name: as written in workflows; Olive's name where Olive has such a pass.
    version: raise it whenever the same inputs would give other bytes: it is part of the cache key.
    uses: distributions whose versions are part of the key ("onnxruntime" stands for any of its flavours).
    needs: distributions that it needs besides, and whose versions change nothing in its result.
    accepts: "checkpoint" for the first step of a chain, "onnx" for the others.
    takes_loras: the pass merges the workflow's LoRAs; their content and scales enter the key.
    imports: modules that its process has imported when it starts, in layers (`sdflow.processes.worker_server`). They
    only save time:
        `run` imports what it needs. For passes of sdflow's own and Olive's; not used for scripts.
    moves_weights: whatever their values are, the pass only puts weights elsewhere, joins, adds or rounds them. So it can
        run on a graph without weights, and BindWeights does to them later what it did (`sdflow.weights.structure`). Of
        a pass that takes LoRAs: it adds them to the parameters and does nothing else, and BindWeights takes its place.
        It is not inherited, for a subclass may do more: a pass says so of itself.
    weights_read_by: options with which it does look at weights, if they are set, and what they do, in words.
    quantizes: the type that it makes of some of the weights, "int8" or "float8_e4m3": what it writes is never taken for a
        float32 or float16 model, and is held to a limit that the workflow states (`sdflow.passes.quantizing`).
    """

    name: ClassVar[str]
    version: ClassVar[int]
    uses: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    accepts: ClassVar[InputKind] = "onnx"
    takes_loras: ClassVar[bool] = False
    imports: ClassVar[tuple[tuple[str, ...], ...]] = ()
    moves_weights: ClassVar[bool] = False
    weights_read_by: ClassVar[Mapping[str, str]] = {}
    quantizes: ClassVar[str | None] = None
    Config: ClassVar[type[PassConfig]]

    @classmethod
    def quantizes_to(cls, config: Mapping[str, Any]) -> str | None:
        """The type that it makes of some of the weights with these options; None: of none."""
        return cls.quantizes

    def source(self, inputs: PassInputs) -> Path:
        """The folder of the model that the step before wrote. Raises PassError where there is no such step."""
        if inputs.model is None:
            raise PassError("needs an ONNX model", where=self.name, remedy="Put OnnxConversion before it.")
        return inputs.model

    @abstractmethod
    def run(self, inputs: PassInputs, out: Path, config: C) -> Facts:
        """Write the artifact's files into the empty directory `out` and return the facts measured on them.

        Raises sdflow.errors.PassError when the input cannot be transformed or the transformation had no effect.
        """
