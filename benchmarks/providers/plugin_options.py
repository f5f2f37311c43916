"""Read the options of providers other than TensorRT (`tensorrt_options.py`) from their wheels, without a GPU.

    python benchmarks/providers/plugin_options.py onnxruntime_ep_nv_tensorrt_rtx_cu13-*.whl > tests/runtime/rtx_options.json
    python benchmarks/providers/plugin_options.py onnxruntime_migraphx-1.27.1-*.whl > tests/runtime/migraphx_options.json

NVIDIA's wheel has a header that lists and describes them. MIGraphX's are strings in its library
(`migraphx_provider_option` in migraphx_execution_provider_info.h).
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

HEADER = "onnxruntime_ep_nv_tensorrt_rtx/tensorrt_rtx_provider_options.h"
LIBRARY = "onnxruntime/capi/libonnxruntime_providers_migraphx.so"

LANDMARK, NEAR = b"migraphx_model_cache_dir", 4096


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as opened:
        if HEADER in opened.namelist():
            source, text = HEADER, opened.read(HEADER).decode()
            text = text[: text.index("namespace env_config_names")]
            found = set(re.findall(r'constexpr const char\* k\w+ = "([^"]+)"', text))
        else:
            source, library = LIBRARY, opened.read(LIBRARY)
            words = list(re.finditer(rb"(?<=\0)(?:migraphx_[a-z0-9_]+|device_id)(?=\0)", library))
            # The functions that it calls are named elsewhere in the file.
            near = next((word.start() for word in words if word[0] == LANDMARK), -NEAR)
            found = {word[0].decode() for word in words if abs(word.start() - near) < NEAR}
    if not found:
        raise SystemExit(f"{wheel.name} names no options where they were: look at {source}")
    told = {"source": f"{source} of {wheel.name}, by benchmarks/providers/plugin_options.py", "options": sorted(found)}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
