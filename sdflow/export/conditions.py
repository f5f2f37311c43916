"""How a prompt becomes what the denoiser reads, as a graph: the family's own `condition`, traced.

In the trace the tokenizers give the graph's inputs, and a text encoder is one node, `sdflow.Run`, for which its graph is put in
afterwards. So a family needs nothing besides what it needs for drawing.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdflow.families.shared.base import Family
from sdflow.families.shared.request import Request

if TYPE_CHECKING:
    import torch

RUN, PART = "Run", "part"
"""The node for a text encoder, and its attribute that says which."""
HEIGHT, WIDTH, SCALE = "height", "width", "guidance_scale"
_PROMPT, _NEGATIVE = "the prompts", "the negative prompts"
TOKENIZER = "tokenizer"
"""How the names of companions that read texts begin."""


@dataclass(frozen=True)
class Source:
    """What a pipeline folder holds. submodels: those that are wanted, in order. configs: of these. options: of
    model_index.json, as the family reads them. companions: loaded."""

    folder: Path
    family: Family
    submodels: tuple[str, ...]
    configs: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]
    companions: Mapping[str, Any]

    def read_outputs(self, name: str) -> list[str]:
        """The outputs of a text encoder's node, in order."""
        part, config = self.family.part(name), self.configs[name]
        ports = part.model.ports(config).outputs
        return [port.name for port in ports if part.read is None or port.name in part.read(config)]


@dataclass(frozen=True)
class Traced:
    """model: a ModelProto whose inputs are of `ids`, height and width of the image in pixels, and the guidance scale, numbers;
    its outputs are the denoiser's inputs. ids: of the token ids, an input each -> the companion that makes them, and whether
    they are the negative prompts'. lengths: companion -> the tokens of a text that the family has it make."""

    model: Any
    ids: Mapping[str, tuple[str, bool]]
    lengths: Mapping[str, int]


def trace_conditions(source: Source, *, guided: bool, negative: bool, opset: int) -> Traced:
    """guided: a row for the negative prompt, and one for the prompt. negative: it is an input; else what the family takes where
    the caller names none. opset: of the graph."""
    import onnx
    import torch

    kinds = (False, True) if guided and negative else (False,)
    family, configs = source.family, source.configs
    tokenizers = {name: each for name, each in source.companions.items() if name.startswith(TOKENIZER)}
    ids = {_input(name, of_negative): (name, of_negative) for of_negative in kinds for name in tokenizers}
    run = _runner(source)

    def conditions(sizes: Sequence[Any], known: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        height, width, scale = sizes
        request = Request(
            [_PROMPT],
            [_NEGATIVE] if guided and negative else None,
            scale,
            height,
            width,
            family.guidance_width(configs),
            denoiser=configs[family.denoiser],
        )
        return family.condition(run, {**source.companions, **known}, source.options, request).inputs

    class Conditions(torch.nn.Module):  # type: ignore[misc]
        outputs: tuple[str, ...] = ()

        def forward(self, height: Any, width: Any, scale: Any, *blocks: Any) -> tuple[Any, ...]:
            texts: dict[str, dict[str, Any]] = {name: {} for name in tokenizers}
            for (name, of_negative), block in zip(ids.values(), blocks, strict=True):
                texts[name][_NEGATIVE if of_negative else _PROMPT] = block
            known = {name: _Tokenizer(each, texts[name]) for name, each in tokenizers.items()}
            found = conditions((height, width, scale), known)
            type(self).outputs = tuple(found)
            return tuple(found.values())

    sizes = {HEIGHT: torch.tensor(64), WIDTH: torch.tensor(96), SCALE: torch.tensor(2.0 if guided else 1.0)}
    measured = {name: _MeasuringTokenizer(each) for name, each in tokenizers.items()}
    conditions(tuple(sizes.values()), measured)
    lengths = {name: each.length for name, each in measured.items()}
    rows = [torch.zeros(2, lengths[name], dtype=torch.int32) for name, _ in ids.values()]
    module, stream = Conditions(), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of constants that are meant to be, and of the exporter's age
        torch.onnx.export(
            module,
            (*sizes.values(), *rows),
            stream,
            dynamo=False,
            opset_version=opset,
            custom_opsets={"sdflow": 1},
            input_names=[*sizes, *ids],
            dynamic_axes={name: {0: "images"} for name in ids},
        )
    model = onnx.load_model_from_string(stream.getvalue())
    for value, name in zip(model.graph.output, module.outputs, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [f"condition/{name}"]))
        value.name = f"condition/{name}"
    return Traced(model, ids, lengths)


def condition_names(traced: Traced) -> dict[str, str]:
    """The denoiser's inputs -> the outputs of the traced graph."""
    return {value.name.removeprefix("condition/"): value.name for value in traced.model.graph.output}


def _input(companion: str, of_negative: bool) -> str:
    """`input_ids` for `tokenizer`, `negative_input_ids_2` for `tokenizer_2`."""
    return f"{'negative_' if of_negative else ''}input_ids{companion.removeprefix(TOKENIZER)}"


class _Tokenizer:
    """Gives the graph's inputs for the texts that stand for them, for others what the real one gives, a row for each image."""

    def __init__(self, real: Any, blocks: Mapping[str, torch.Tensor]) -> None:
        self._real, self._blocks = real, blocks
        self.model_max_length = real.model_max_length

    def __call__(self, texts: list[str], **options: Any) -> Any:
        import torch

        images = next(iter(self._blocks.values())).shape[0]
        rows = [
            self._blocks[text]
            if text in self._blocks
            else self._real([text], **options).input_ids.to(torch.int32).expand(images, -1)
            for text in texts
        ]
        return SimpleNamespace(input_ids=torch.cat(rows))


class _MeasuringTokenizer:
    """Gives zeros. length: the tokens of a text that it was asked for."""

    def __init__(self, real: Any) -> None:
        self.model_max_length = real.model_max_length
        self.length = 0

    def __call__(self, texts: list[str], *, max_length: int, **options: Any) -> Any:
        import torch

        self.length = max_length
        return SimpleNamespace(input_ids=torch.zeros(len(texts), max_length, dtype=torch.int32))


def _runner(source: Source) -> Any:
    """A `Run` whose trace is one node. What it gives has the right names and shapes, and no values."""
    import torch

    def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        part, config = source.family.part(name), source.configs[name]
        ports, names = part.model.ports(config), source.read_outputs(name)
        wanted = [port for port in ports.outputs if port.name in names]
        (read,) = (port.name for port in ports.inputs)

        class Run(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
                sizes = {"batch": ids.shape[0], **part.model.token_sizes(config, {read: ids.shape})}
                return tuple(torch.zeros(port.shape(sizes)) for port in wanted)

            @staticmethod
            def symbolic(graph: Any, ids: Any) -> Any:
                made = graph.op("sdflow::Run", ids, part_s=name, outputs=len(wanted))
                for value, port in zip(made if len(wanted) > 1 else (made,), wanted, strict=True):
                    value.setType(ids.type().with_dtype(torch.float32).with_sizes([None] * len(port.axes)))
                return made

        found = Run.apply(inputs[read])
        return dict(zip((port.name for port in wanted), found, strict=True))

    return run
