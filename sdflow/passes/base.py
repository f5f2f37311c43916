"""Base classes of passes.

A pass reads a submodel's checkpoint or the previous step's artifact, and writes one artifact. It never sees the cache.
Each pass runs in its own process (`sdflow.passes.worker`), so keep heavy imports inside `run`.
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
"""Values for `Pass.imports`. These imports start no lasting threads, and read nothing but the installation."""


class PassConfig(BaseModel):
    """Options of a pass. Unknown options are errors; all defaults are part of the cache key."""

    model_config = ConfigDict(extra="forbid", frozen=True)


C = TypeVar("C", bound=PassConfig)


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a pass.

    model: the previous step's directory (`model.onnx`, ...), or None for the first step.
    checkpoint: how to load the submodel's PyTorch module (`sdflow.sources.load_module`), as JSON. Empty for later steps
        except BindWeights: their cache key excludes the checkpoint, so they read the architecture from `config.json`.
    family: name of the submodel's family.
    loras: in the workflow's order; empty unless the pass sets `takes_loras`.
    base: for BindWeights, the artifact of the same step without LoRAs, if one exists.
    base_sha256: expected SHA-256 of the base's data file; None without a base.
    base_sums: expected page sums of the base's data file (`sdflow.weights.stream`); None if unknown.
    progress: call with a short phrase when a new phase begins.
    hashed: BindWeights calls it with the name and SHA-256 of each file that it hashes while writing.
    summed: BindWeights calls it with the page sums of its data file, and those of the base's if it hashed that too.
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
    """A transformation step. Subclasses set the class variables and implement `run`.

    name: name in workflows; equals Olive's name if Olive has the pass.
    version: part of the cache key; increment it whenever the same inputs would produce different bytes.
    uses: distributions whose versions are part of the key ("onnxruntime" stands for any of its flavours).
    needs: further required distributions, whose versions do not affect the result.
    accepts: "checkpoint" for the first step of a chain, "onnx" for all others.
    takes_loras: the pass merges the workflow's LoRAs; their content and scales are part of the key.
    imports: modules to preload in the worker process, in layers (`sdflow.processes.worker_server`). Only saves time:
        `run` still imports what it needs. For sdflow's and Olive's passes; ignored for scripts.
    moves_weights: the pass only moves, joins, adds, scales or rounds weights, regardless of their values. It can therefore run
        on a graph without weights, and BindWeights replays its operations later (`sdflow.weights.structure`). A pass
        with `takes_loras` must only add LoRAs to parameters; BindWeights replaces it. Not inherited, because a
        subclass may do more: each class declares it.
    weights_read_by: options that make the pass read weight values when set, each with a description of the effect.
    quantizes: the type that some weights are quantized to, such as "int8" or "float8_e4m3". The artifact then never
        counts as float32 or float16, and is verified against the workflow's limit (`sdflow.passes.quantizing`).
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
        """Return the type that some weights are quantized to with these options, or None."""
        return cls.quantizes

    def source(self, inputs: PassInputs) -> Path:
        """Return the previous step's model folder. Raises PassError if there is no previous step."""
        if inputs.model is None:
            raise PassError("needs an ONNX model", where=self.name, remedy="Put OnnxConversion before it.")
        return inputs.model

    @abstractmethod
    def run(self, inputs: PassInputs, out: Path, config: C) -> Facts:
        """Write the artifact's files into the empty directory `out` and return the facts measured on them.

        Raises sdflow.errors.PassError when the input cannot be transformed or the transformation had no effect.
        """
