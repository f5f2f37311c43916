"""The graphs that `bench/ablation.py` measures: full-size Stable Diffusion 1.5 for CUDA, without weights.

    python bench/ablation_graphs.py OUT [--model synthetic:sd15]

Takes some minutes and 2 GB of memory on two cores; OUT is 3 MB and goes to the CUDA machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from structure_and_weights import SILENCE, structure

VARIANTS: dict[str, dict[str, bool]] = {
    "resize": {},
    "bias": {},
    "bias_resize": {},
    "bias_norm": {"group_norm": True},
    "bias_norm_resize": {"group_norm": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="synthetic:sd15")
    arguments = parser.parse_args()
    os.environ.update(SILENCE)  # before anything imports olive
    from sdflow.passes.base import PassInputs
    from sdflow.passes.conv_bias_fusion import ConvBiasFusion, ConvBiasFusionConfig
    from sdflow.passes.nhwc_resize import NhwcResize, NhwcResizeConfig

    for submodel in ("unet", "vae_decoder", "text_encoder"):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            base.mkdir()
            structure(arguments.model, submodel, "cuda", base)
            _take(base, arguments.out / f"{submodel}.base")
            for name, options in VARIANTS.items() if submodel != "text_encoder" else ():
                built = base
                if "bias" in name:
                    inputs, built = PassInputs(submodel, built, {}), Path(folder) / f"{name}-fused"
                    built.mkdir()
                    facts = ConvBiasFusion().run(inputs, built, ConvBiasFusionConfig(**options))
                    print(f"{submodel}.{name}: folded {facts['folded']}, kept {facts['kept']}")
                if "resize" in name:
                    inputs, built = PassInputs(submodel, built, {}), Path(folder) / f"{name}-resized"
                    built.mkdir()
                    print(
                        f"{submodel}.{name}: replaced {NhwcResize().run(inputs, built, NhwcResizeConfig())['replaced']}"
                    )
                _take(built, arguments.out / f"{submodel}.{name}")


def _take(built: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built / "model.onnx", out / "model.onnx")


if __name__ == "__main__":
    main()
