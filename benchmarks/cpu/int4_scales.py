"""Compare weights in 4 bits by `QuantizeInt4`'s two algorithms and by HQQ with the originals, for normally distributed weights.

    python benchmarks/cpu/int4_scales.py [--side 3072] [--block-size 32]

Reports each algorithm's relative L2 distance to the original, also as a fraction of `rtn`'s, and its processor time. HQQ is ONNX
Runtime's `HQQWeightOnlyQuantizer`; its zero points are floating-point numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.distance import relative_l2
from sdflow.weights.blockwise import Algorithm, Format, quantize

BITS = 4


def by_blocks(weight: np.ndarray, size: int, algorithm: Algorithm) -> tuple[np.ndarray, float]:
    """Return the values that `QuantizeInt4` stores, and the seconds of processor time. size: of a block."""
    begun = time.process_time()
    stored = quantize(weight, Format(BITS, size, False, algorithm, "float32"))
    seconds = time.process_time() - begun
    numbers, zeros = (unpacked(each).astype(np.float32) for each in (stored.values, stored.zeros))
    middle = zeros[:, : stored.scales.shape[1], None]
    return ((numbers - middle) * stored.scales[..., None]).reshape(weight.shape), seconds


def unpacked(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> BITS], -1).reshape(*packed.shape[:-1], -1)


def by_hqq(weight: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=size, bits=BITS))
    begun = time.process_time()
    values, scales, zeros = quantizer.quantize_internal(torch.from_numpy(weight), bits=BITS, group_size=size)
    seconds = time.process_time() - begun
    blocks = values.reshape(len(weight), -1, size)
    return ((blocks - zeros[..., None]) * scales[..., None]).reshape(weight.shape).numpy(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=3072, help="rows and columns of the weight")
    parser.add_argument("--block-size", type=int, default=32)
    options = parser.parse_args()
    weight = np.random.default_rng(0).standard_normal((options.side, options.side)).astype(np.float32)
    size = options.block_size
    quantized = {
        "rtn": by_blocks(weight, size, "rtn"),
        "mse": by_blocks(weight, size, "mse"),
        "HQQ": by_hqq(weight, size),
    }
    distances = {name: relative_l2(values, weight) for name, (values, _) in quantized.items()}
    for name, (_, seconds) in quantized.items():
        part = distances[name] / distances["rtn"]
        print(f"{name}: {distances[name]:.4f}, {part:.3f} of rtn's; {1e9 * seconds / weight.size:.0f} ns a weight")


if __name__ == "__main__":
    main()
