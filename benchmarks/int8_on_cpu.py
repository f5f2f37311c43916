"""Whether int8 pays on a CPU: a built UNet quantized by onnxruntime's `quantize_dynamic`, beside itself in float32, in turns.

    python benchmarks/int8_on_cpu.py pipelines/shapes_cpu [--rounds 8]

Weights per channel; products alone, then products and convolutions. One thread, batch 2, made-up inputs: processor time of a run,
the fastest, the size of the file, and the distance to float32's output (relative L2).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

from sdflow.distance import relative_l2
from sdflow.models.base import Sizes
from sdflow.runtime.files.folder import folder_family, folder_latents, submodel_config

KINDS = {"products in int8": ["MatMul", "Gemm"], "products and convolutions": ["MatMul", "Gemm", "Conv"]}


def session(model: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    family, latents = folder_family(options.pipeline), folder_latents(options.pipeline)
    name, pixels = family.denoiser, latents.image_size
    sizes = Sizes(batch=2, height=pixels, width=pixels, vae_scale=latents.scale)
    feeds = family.part(name).model.dummy(submodel_config(options.pipeline, name), sizes, 0)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "float32.onnx"
        model = onnx.load(str(options.pipeline / name / "model.onnx"))
        if not any(each.domain == "com.microsoft" for each in model.opset_import):  # shapes are inferred with it
            model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        onnx.save(model, str(whole))
        files = {"float32": whole}
        for kind, operators in KINDS.items():
            files[kind] = Path(scratch) / f"{len(files)}.onnx"
            more = {"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True}
            quantize_dynamic(
                whole, files[kind], operators, per_channel=True, weight_type=QuantType.QInt8, extra_options=more
            )
        sessions = {kind: session(file) for kind, file in files.items()}
        outputs: dict[str, np.ndarray] = {}
        best = dict.fromkeys(files, float("inf"))
        for _ in range(options.rounds):
            for kind, each in sessions.items():
                begun = time.process_time()
                outputs[kind] = each.run(None, feeds)[0]
                best[kind] = min(best[kind], time.process_time() - begun)
        for kind, file in files.items():
            distance = relative_l2(outputs[kind], outputs["float32"])
            print(f"{kind}: {1e3 * best[kind]:.1f} ms, {file.stat().st_size / 1e6:.1f} MB, {distance:.4f} from float32")


if __name__ == "__main__":
    main()
