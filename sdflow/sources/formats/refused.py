"""Recognize unsupported quantized safetensors files by their tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sdflow.sources.formats.stored import Refusal
from sdflow.sources.safetensors_file import TensorEntry

_PLAIN = "Use the model's float16, bfloat16, float8 or GGUF file."


@dataclass(frozen=True)
class _Kind:
    """An unsupported format.

    name: of the format. what: its description. holds: whether a file with tensors of these names has it.
    """

    name: str
    what: str
    holds: Callable[[Iterable[str]], bool]


def _ends(*suffixes: str) -> Callable[[Iterable[str]], bool]:
    """A check that, for each of these suffixes, some name ends with it."""
    return lambda names: all(any(name.endswith(suffix) for name in names) for suffix in suffixes)


_KINDS = (
    _Kind("svdq", "nunchaku's SVDQuant (svdq): 4-bit weights with a low-rank part", _ends(".qweight", ".wscales")),
    _Kind("gptq", "GPTQ or AWQ: 4-bit weights", _ends(".qweight", ".qzeros")),
    _Kind("bnb-nf4", "bitsandbytes NF4", _ends(".quant_state.bitsandbytes__nf4")),
    _Kind("bnb-fp4", "bitsandbytes FP4", _ends(".quant_state.bitsandbytes__fp4")),
    _Kind("bnb-4bit", "bitsandbytes in 4 bits", _ends(".absmax", ".quant_map")),
    _Kind("bnb-int8", "bitsandbytes LLM.int8", _ends(".SCB")),
    _Kind("fp8-blocks", "float8 with a scale for each block (transformers' fp8)", _ends(".weight_scale_inv")),
    _Kind("compressed-tensors", "compressed-tensors", _ends(".weight_packed")),
    _Kind("torchao", "torchao", _ends(".weight_qdata")),
    _Kind("sdnq", "SDNQ", _ends(".svd_up", ".svd_down")),
)


def refused_format(header: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> tuple[str, Refusal] | None:
    """The name of an unsupported format, and the refusal; None for any other file."""
    if "nunchaku" in metadata.get("model_class", "").lower():
        return "svdq", _refusal(_KINDS[0].what)
    for kind in _KINDS:
        if kind.holds(header):
            return kind.name, _refusal(kind.what)
    if any(entry.dtype in ("I8", "U8") and f"{name.removesuffix('.weight')}.scale" in header
           for name, entry in header.items() if name.endswith(".weight")):  # fmt: skip
        return "sdnq", _refusal("SDNQ")
    return None


def refused_method(config: Mapping[str, object]) -> str | None:
    """The quantization method of a folder's weights, from its config.json; None if there is none."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    return str(said.get("quant_method") or said.get("quant_type") or "an unnamed method")[:60]


def _refusal(what: str) -> Refusal:
    return Refusal(f"its weights are quantized with {what}, which sdflow does not read", _PLAIN)
