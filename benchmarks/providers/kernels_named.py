"""Read QNN's operators from their names in the library of the Windows wheel, without running it.

The provider registers a builder per operator name (`op_builder_factory.cc`), and the compiler stores nearly all names
contiguously. The region with the most operator names is used. Some names are missing there, because the linker shares
them with another string or because short ones are inlined in code: the provider may take an operator that is not found.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

LIBRARY = "onnxruntime_qnn/libs/amd64/onnxruntime_providers_qnn.dll"
KNOWN = frozenset({"MatMul", "LayerNormalization", "Resize", "Gather", "Add", "Where"})
"""Operators that the provider takes for certain (they stand in ONNX Runtime's documentation of it)."""
NEAR = 4096
"""Bytes that their names take."""


def qnn_kernels(wheel: Path) -> list[str]:
    """The operators of ONNX and com.microsoft that the library names where it registers its builders.

    Raises SystemExit where those that it takes for certain are not among them.
    """
    from onnx import defs
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(LIBRARY)
    standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    microsoft = {schema.name for schema in get_all_operator_schema() if schema.domain == "com.microsoft"} - standard
    places: list[tuple[int, str]] = []
    for match in re.finditer(rb"(?<=\0)([A-Za-z][A-Za-z0-9]{1,60})(?=\0)", data):
        name = match[1].decode()
        if name in standard or name in microsoft:
            places.append((match.start(), name))
    best: list[str] = []
    first = 0
    for last in range(len(places)):
        while places[last][0] - places[first][0] > NEAR:
            first += 1
        names = sorted({name for _, name in places[first : last + 1]})
        if len(names) > len(best):
            best = names
    if missing := sorted(KNOWN - set(best)):
        raise SystemExit(f"{', '.join(missing)} are not where the other operators are: look at the library again")
    return [name if name in standard else f"com.microsoft.{name}" for name in best]
