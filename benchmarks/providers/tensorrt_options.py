"""Read the options of ONNX Runtime's TensorRT provider from its library, without TensorRT or a GPU.

    python benchmarks/providers/tensorrt_options.py onnxruntime_gpu-1.31.1-cp311-*.whl > tests/runtime/tensorrt_options.json

Their names are strings in the library (`provider_option_names` in tensorrt_execution_provider_info.cc). They are
documented at https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

LIBRARY = "onnxruntime/capi/libonnxruntime_providers_tensorrt.so"
OPTION = re.compile(rb"(?<=\0)(?:trt_[a-z0-9_]+|device_id|has_user_compute_stream)(?=\0)")
TAILS = ("user_compute_stream",)
"""Options that are another's tail: linkers store the longer text alone."""
NEEDED = re.compile(rb"(?<=\0)lib(?:nvinfer|nvonnxparser|cudart|cudnn|cublas)\.so\.\d+(?=\0)")


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as opened:
        library = opened.read(LIBRARY)
    found = {
        "source": f"text in {LIBRARY} of {wheel.name}, by benchmarks/providers/tensorrt_options.py",
        "needs": sorted({each.decode() for each in NEEDED.findall(library)}),
        "options": sorted(
            {each.decode() for each in OPTION.findall(library)}
            | {each for each in TAILS if f"{each}\0".encode() in library}
        ),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
