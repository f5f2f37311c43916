"""The graphs that `benchmarks/ablation.py` measures: full-size Stable Diffusion 1.5 for CUDA, without weights.

    python benchmarks/ablation_graphs.py OUT [--model synthetic:sd15] [--base STRUCTURES] [--best OUT]

Takes some minutes and 2 GB of memory on two cores; OUT is 3 MB and goes to the CUDA machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from structure_and_weights import SILENCE, structure

UNET = {
    "resize": ("resize",),
    "bias_resize": ("bias", "resize"),
    "norms": ("bias+norm", "resize"),
    "norms_qkv320": ("bias+norm", "resize", "qkv320"),
    "norms_qkv640": ("bias+norm", "resize", "qkv640"),
}
"""Variant -> passes: bias is ConvBiasFusion without LayerNormalization, bias+norm with it; resize NhwcResize;
qkv640 SeparateQkv up to that width."""
VAE_DECODER = {
    "resize": ("resize",),
    "bias_resize": ("bias", "resize"),
}
VARIANTS: Mapping[str, Mapping[str, Sequence[str]]] = {"unet": UNET, "vae_decoder": VAE_DECODER, "text_encoder": {}}


def passes() -> dict[str, tuple[Any, Any]]:
    """The passes by the names that variants call them."""
    from sdflow.passes.conv_bias_fusion import ConvBiasFusion, ConvBiasFusionConfig
    from sdflow.passes.nhwc_resize import NhwcResize, NhwcResizeConfig
    from sdflow.passes.separate_qkv import SeparateQkv, SeparateQkvConfig

    return {
        "bias": (ConvBiasFusion, ConvBiasFusionConfig(layer_norm=False)),
        "bias+norm": (ConvBiasFusion, ConvBiasFusionConfig()),
        "resize": (NhwcResize, NhwcResizeConfig()),
        **{f"qkv{widest}": (SeparateQkv, SeparateQkvConfig(widest=widest)) for widest in (320, 640)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="synthetic:sd15")
    parser.add_argument("--base", type=Path, help="structures to start from: unet, vae_decoder, text_encoder")
    parser.add_argument("--best", type=Path, help="write the structures for benchmarks/image_latency.py here too")
    arguments = parser.parse_args()
    os.environ.update(SILENCE)  # before anything imports olive
    best = {"unet": "norms_qkv640", "vae_decoder": "bias_resize", "text_encoder": "base"}
    for submodel, variants in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            base = arguments.base / submodel if arguments.base else Path(folder) / "base"
            if not arguments.base:
                base.mkdir()
                structure(arguments.model, submodel, "cuda", base)
            for name, chain in {"base": (), **variants}.items():
                built = _built(submodel, base, chain, Path(folder) / name)
                _take(built, arguments.out / f"{submodel}.{name}", ["model.onnx"])
                if arguments.best and name == best[submodel]:
                    _take(built, arguments.best / submodel, ["model.onnx", "parameters.json", "config.json"])


def _built(submodel: str, base: Path, chain: Sequence[str], folder: Path) -> Path:
    """The structure behind a chain of passes."""
    from sdflow.passes.base import PassInputs

    built, known = base, passes()
    for name in chain:
        implementation, config = known[name]
        out = folder / name
        out.mkdir(parents=True)
        facts = implementation().run(PassInputs(submodel, built, {}), out, config)
        counts = {key: facts[key] for key in ("folded", "kept", "replaced", "separated") if key in facts}
        print(f"{submodel}.{folder.name}: {implementation.name} {counts}")
        if not (out / "parameters.json").exists():
            shutil.copyfile(base / "parameters.json", out / "parameters.json")
        built = out
    return built


def _take(built: Path, out: Path, files: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copyfile(built / name, out / name)


if __name__ == "__main__":
    main()
