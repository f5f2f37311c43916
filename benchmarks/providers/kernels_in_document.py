"""Read TensorRT's operators from its parser's documentation: docs/operators.md of github.com/onnx/onnx-tensorrt.

The parser is inside TensorRT's libraries, so the document is the closest source. Its last column, restrictions in
prose, is not read: those that matter to sdflow's graphs are in conditions.json.
"""

from __future__ import annotations

import re
from typing import Any

TYPES = {
    "FP32": "float double",  # a double is cast to float there
    "FP16": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
    "INT8": "",  # quantized graphs; sdflow writes none
    "FP8": "",
    "INT4": "",
    "FP4": "",
    "FP8E8M0": "",
}
ANY_VERSION = "any"


def tensorrt_kernels(document: str) -> tuple[str, int, dict[str, Any]]:
    """The release of TensorRT, the highest opset that it takes, and the rows of the table by operator.

    Raises SystemExit for a document of another form, or with a type that is not known here.
    """
    said = re.search(
        r"TensorRT (\d+\.\d+) supports operators .*?opset (?:\d+ to opset )?(\d+)", document, re.IGNORECASE
    )
    if said is None:
        raise SystemExit("the document does not say which opsets TensorRT supports")
    rows: dict[str, Any] = {}
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", cells[0]) or len(cells) < 2 or cells[0] == "Operator":
            continue
        if not re.fullmatch(r"[YN]( \[EXPERIMENTAL\])?", cells[1]):
            raise SystemExit(f"{cells[0]} is neither supported nor not: {cells[1]}")
        if cells[1].startswith("Y"):
            words = re.findall(r"\b[A-Z]+\d[A-Z\d]*\b|\bBOOL\b", cells[2]) if len(cells) > 2 else []
            if unknown := [word for word in words if word not in TYPES]:
                raise SystemExit(f"{cells[0]} takes {', '.join(unknown)}, which this command does not know")
            kinds = " ".join(sorted(name for word in words for name in TYPES[word].split()))
            rows[cells[0]] = [[1, ANY_VERSION, {"0": kinds} if kinds else {}]]
    return said[1], int(said[2]), rows
