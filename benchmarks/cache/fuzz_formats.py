"""The kind `format` of `fuzz.py`: mutated GGUF and quantized safetensors files. Accepted files must have the values
that `gguf` and PyTorch compute from the same bytes.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cache.fuzz_inputs import mutated_bytes, mutated_safetensors

ALIKE = 1e-5
"""Largest difference of a rotated weight, as a part of its largest value: PyTorch rounds each sum."""


class WrongValues(Exception):
    """A file was taken, and its values are not those of the libraries."""


def write_format_samples(folder: Path) -> None:
    """small.gguf, fp8_scaled.safetensors, int8.safetensors and header.safetensors."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from safetensors.torch import save_file

    folder.mkdir()
    values = np.random.default_rng(0)
    writer = GGUFWriter(folder / "small.gguf", "flux")
    writer.add_uint32("general.file_type", 7)
    writer.add_array("general.tags", ["image", "small"])
    writer.add_array("comfy.gguf.orig_shape.reshaped.weight", [8, 4, 4, 4])
    for name, shape, kind in (
        ("norm.weight", (8,), GGMLQuantizationType.F32),
        ("img_in.weight", (4, 64), GGMLQuantizationType.Q8_0),
        ("txt_in.weight", (4, 32), GGMLQuantizationType.BF16),
        ("reshaped.weight", (2, 256), GGMLQuantizationType.Q4_0),
        ("out.weight", (3, 5), GGMLQuantizationType.F16),
    ):
        written = quantize(values.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(name, written, raw_dtype=kind)
    writer.add_tensor("k.weight", np.full((2, 144), 17, np.uint8), raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    random_weight = torch.from_numpy(values.standard_normal((4, 16)).astype(np.float32))
    plain = {"a.bias": torch.ones(4), "norm.weight": torch.ones(16, dtype=torch.bfloat16)}
    float8 = {"a.weight": random_weight.to(torch.float8_e4m3fn), "b.weight": random_weight.to(torch.float8_e5m2)}
    scales = {
        "a.scale_weight": torch.tensor(0.5),
        "b.scale_weight": torch.tensor([2.0]),
        "a.scale_input": torch.tensor(1.0),
    }
    marker = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    save_file({**plain, **float8, **scales, **marker}, folder / "fp8_scaled.safetensors")
    whole = {name: (random_weight * 40).to(torch.int8) for name in ("a.weight", "b.weight", "c.weight")}
    columns = {"a.weight_scale": torch.rand(4, 1), "b.weight_scale": torch.rand(()), "c.weight_scale": torch.rand(4, 1)}
    layers = {
        "a": {"format": "int8_tensorwise"},
        "b": {"format": "int8_tensorwise", "params": {"convrot": False}},
        "c": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    }
    described = {
        f"{name}.comfy_quant": torch.tensor(list(json.dumps(each).encode()), dtype=torch.uint8)
        for name, each in layers.items()
    }
    save_file({**plain, **whole, **columns, **described}, folder / "int8.safetensors")
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save_file({**plain, **whole, **columns}, folder / "header.safetensors", metadata)


def formats(root: Path) -> Callable[[random.Random, Path], str]:
    import gguf  # noqa: F401  (before the clock runs)
    import torch  # noqa: F401
    from safetensors import SafetensorError

    from sdflow.inspection.contents import read_contents
    from sdflow.sources.formats import open_weights
    from sdflow.verify.low_bits import dequantized_file

    samples = [(path.suffix, path.read_bytes()) for path in sorted((root / "formats").iterdir())]

    def case(chance: random.Random, folder: Path) -> str:
        suffix, content = samples[-1] if chance.random() < 0.5 else chance.choice(samples)
        if chance.random() < 0.6:
            changed = replaced_bytes(content, chance)
        else:
            changed = (mutated_bytes if suffix == ".gguf" else mutated_safetensors)(content, chance)
        path = folder / f"any{suffix}"
        path.write_bytes(changed)
        read_contents(path)
        opened = open_weights(path)
        opened.require_read()
        ours = {name: tensor.values() for name, tensor in opened.tensors.items() if tensor.weights}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = {name: each[1]() for name, each in dequantized_file(path)[0].items() if name in ours}
        except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            return f"taken, and the library fails ({type(error).__name__})"
        rotated = {name for name, each in opened.meaning.items() if each.get("rotated")}
        for name, values in theirs.items():
            require_alike(name, ours[name], values.numpy(), rotated=name in rotated)
        return "taken, with the values of the library"

    return case


def replaced_bytes(content: bytes, chance: random.Random) -> bytes:
    """A copy of the same length: one to three bytes replaced, of the first kilobyte or of all."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(min(1024, len(data)) if chance.random() < 0.5 else len(data))
        data[at] = chance.choice((0, 1, 2, 8, 12, 30, 127, 128, 255, data[at] ^ 1 << chance.randrange(8)))
    return bytes(data)


def require_alike(name: str, ours: Any, theirs: Any, *, rotated: bool) -> None:
    """Raises WrongValues."""
    import numpy as np

    if ours.shape != theirs.shape:
        raise WrongValues(f"{name[:100]} is {ours.shape}, not {theirs.shape}")
    if rotated:
        finite = np.isfinite(theirs)
        most = float(np.abs(theirs[finite]).max(initial=0))
        if float(np.abs(ours[finite].astype(np.float64) - theirs[finite]).max(initial=0)) > ALIKE * most:
            raise WrongValues(f"{name[:100]} is not rotated as PyTorch does")
    elif not np.array_equal(ours.astype(np.float32), theirs, equal_nan=True):
        raise WrongValues(f"{name[:100]} has other values")
