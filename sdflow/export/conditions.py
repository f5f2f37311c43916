"""Prompts to the denoiser's inputs, as a graph: the family's own `condition`, traced.

In the trace, tokenizers return the graph's inputs, and a text encoder is a node `sdflow.Run`, later replaced by its
graph. So a family needs no code of its own for exports. The mask of a text is computed from its ids. Chat templates
stay outside: programs put both halves around the text.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.families.shared.base import Family
from sdflow.families.shared.request import Request

if TYPE_CHECKING:
    import torch

RUN, PART = "Run", "part"
"""The placeholder node of a text encoder, and its attribute with the submodel."""
HEIGHT, WIDTH, SCALE = "height", "width", "guidance_scale"
_PROMPT, _NEGATIVE = "the prompts", "the negative prompts"
TOKENIZER = "tokenizer"
"""Prefix of companions that read texts."""


@dataclass(frozen=True)
class Traced:
    """The graph from token ids to the denoiser's inputs.

    model: a ModelProto with inputs `ids`, height and width of the image in pixels, and the guidance scale; its
    outputs are the denoiser's inputs. ids: token id input -> the companion that makes it, and whether it is the
    negative prompts'.
    lengths: companion -> tokens per text. templates: companion -> prefix and suffix of its chat template, if any.
    tokens: sizes of the denoiser's token axes.
    """

    model: Any
    ids: Mapping[str, tuple[str, bool]]
    lengths: Mapping[str, int]
    templates: Mapping[str, tuple[str, str]]
    tokens: Mapping[str, int]


def trace_conditions(
    family: Family,
    configs: Mapping[str, Mapping[str, Any]],
    companions: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    guided: bool,
    negative: bool,
    opset: int,
) -> Traced:
    """guided: a row for the negative prompt, and one for the prompt. negative: whether it is an input; otherwise the
    family's default is used. configs: by part. companions: loaded. opset: of the graph."""
    import onnx
    import torch

    kinds = (False, True) if guided and negative else (False,)
    tokenizers = {name: each for name, each in companions.items() if name.startswith(TOKENIZER)}
    ids = {_input(name, of_negative): (name, of_negative) for of_negative in kinds for name in tokenizers}
    run = _runner(family, configs)

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
        return family.condition(run, {**companions, **known}, options, request).inputs

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
    shapes = {name: tuple(each.shape) for name, each in conditions(tuple(sizes.values()), measured).items()}
    tokens = family.part(family.denoiser).model.token_sizes(configs[family.denoiser], shapes)
    lengths = {name: each.length for name, each in measured.items()}
    rows = [torch.zeros(2, lengths[name], dtype=torch.int32) for name, _ in ids.values()]
    module, stream = Conditions(), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about intended constants, and the exporter's deprecation
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
    templates = {name: each.template for name, each in measured.items() if each.template is not None}
    return Traced(model, ids, lengths, templates, tokens)


def condition_names(traced: Traced) -> dict[str, str]:
    """The denoiser's inputs -> the outputs of the traced graph."""
    return {value.name.removeprefix("condition/"): value.name for value in traced.model.graph.output}


def _input(companion: str, of_negative: bool) -> str:
    """`input_ids` for `tokenizer`, `negative_input_ids_2` for `tokenizer_2`."""
    return f"{'negative_' if of_negative else ''}input_ids{companion.removeprefix(TOKENIZER)}"


class _Encoded(dict[str, Any]):
    """A tokenizer's result, whose entries are also attributes, as in transformers."""

    __getattr__ = dict.__getitem__


class _Tokenizer:
    """Returns the graph's inputs for placeholder texts, and the real tokenizer's result for others, repeated per
    image."""

    def __init__(self, real: Any, blocks: Mapping[str, torch.Tensor]) -> None:
        self._real, self._blocks = real, blocks
        self.model_max_length = real.model_max_length

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        """A placeholder's ids cover the whole chat."""
        (message,) = messages
        text = message["content"]
        return text if text in self._blocks else str(self._real.apply_chat_template(messages, **options))

    def __call__(self, texts: list[str], **options: Any) -> Any:
        import torch

        images = next(iter(self._blocks.values())).shape[0]
        ids, masks = [], []
        for text in texts:
            if text in self._blocks:
                ids.append(self._blocks[text])
                masks.append(_mask(ids[-1], self._real.pad_token_id))
                continue
            found = self._real([text], **{**options, "padding": "max_length", "return_tensors": "pt"})
            for rows, made in ((ids, found.input_ids), (masks, found.attention_mask)):
                rows.append(made.to(torch.int32).expand(images, -1))
        return _Encoded(input_ids=torch.cat(ids), attention_mask=torch.cat(masks))


def _mask(ids: torch.Tensor, pad: int) -> torch.Tensor:
    """1 up to the last token other than padding, then 0; int32. Texts are padded on the right."""
    import torch

    places = torch.arange(ids.shape[1], dtype=torch.int32)
    length = ((ids != pad) * (places + 1)).amax(dim=1, keepdim=True)
    return (places < length).to(torch.int32)


class _MeasuringTokenizer:
    """Returns zeros, and records the requested length and the chat template's prefix and suffix."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.model_max_length = real.model_max_length
        self.length = 0
        self.template: tuple[str, str] | None = None

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        marked = [{**message, "content": _PROMPT} for message in messages]
        chat = str(self._real.apply_chat_template(marked, **options))
        before, _, behind = chat.partition(_PROMPT)
        self.template = before, behind
        return chat

    def __call__(self, texts: list[str], *, max_length: int, **options: Any) -> Any:
        import torch

        self.length = max_length
        zeros = torch.zeros(len(texts), max_length, dtype=torch.int32)
        return _Encoded(input_ids=zeros, attention_mask=zeros)


def _runner(family: Family, configs: Mapping[str, Mapping[str, Any]]) -> Any:
    """A `Run` that is traced as one node. Its results have the right names and shapes, without values."""
    import torch

    def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        part, config = family.part(name), configs[name]
        model, ports = part.of(config).model, part.ports(config)
        names = read_outputs(family, name, config)
        wanted = [port for port in ports.outputs if port.name in names]
        read = [port.name for port in ports.inputs]

        class Run(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                shapes = {port: value.shape for port, value in zip(read, given, strict=True)}
                sizes = {"batch": given[0].shape[0], **model.token_sizes(config, shapes)}
                return tuple(torch.zeros(port.shape(sizes)) for port in wanted)

            @staticmethod
            def symbolic(graph: Any, *given: Any) -> Any:
                made = graph.op("sdflow::Run", *given, part_s=name, outputs=len(wanted))
                for value, port in zip(made if len(wanted) > 1 else (made,), wanted, strict=True):
                    value.setType(given[0].type().with_dtype(torch.float32).with_sizes([None] * len(port.axes)))
                return made

        found = Run.apply(*(inputs[port] for port in read))
        return dict(zip((port.name for port in wanted), found, strict=True))

    return run


def read_outputs(family: Family, name: str, config: Mapping[str, Any]) -> list[str]:
    """The outputs of a text encoder's node, in order."""
    part = family.part(name)
    ports = part.ports(config).outputs
    return [port.name for port in ports if part.read is None or port.name in part.read(config)]
