"""The graphs that `bench/ablation.py` measures: full-size Stable Diffusion 1.5 for CUDA, without weights.

    python bench/ablation_graphs.py OUT [--model synthetic:sd15]

Takes some minutes and 2 GB of memory on two cores; OUT is 1.3 MB and goes to the CUDA machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from structure_and_weights import SILENCE, structure

VARIANTS = {"bias": {}, "bias_norm": {"group_norm": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="synthetic:sd15")
    arguments = parser.parse_args()
    os.environ.update(SILENCE)  # before anything imports olive
    from sdflow.passes.base import PassInputs
    from sdflow.passes.conv_bias_fusion import ConvBiasFusion, ConvBiasFusionConfig

    for submodel in ("unet", "vae_decoder", "text_encoder"):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            base.mkdir()
            structure(arguments.model, submodel, "cuda", base)
            _take(base, arguments.out / f"{submodel}.base")
            for name, options in VARIANTS.items() if submodel != "text_encoder" else ():
                built = Path(folder) / name
                built.mkdir()
                facts = ConvBiasFusion().run(PassInputs(submodel, base, {}), built, ConvBiasFusionConfig(**options))
                print(f"{submodel}.{name}: folded {facts['folded']}, kept {facts['kept']}")
                _take(built, arguments.out / f"{submodel}.{name}")


def _take(built: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built / "model.onnx", out / "model.onnx")


if __name__ == "__main__":
    main()
