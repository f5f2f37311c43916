"""The tables of kernels are drawn from what they name as their source, and hold what the providers' binaries say."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks.providers.kernels_asked import READ, migraphx_kernels
from benchmarks.providers.kernels_in_dll import BITS, LIBRARY, RECORD, directml_kernels
from benchmarks.providers.kernels_in_document import tensorrt_kernels
from benchmarks.providers.kernels_named import KNOWN as QNN_KNOWN
from benchmarks.providers.kernels_named import LIBRARY as QNN_LIBRARY
from benchmarks.providers.kernels_named import qnn_kernels
from benchmarks.providers.kernels_placed import placed_rows
from sdflow.verify.kernels import kernel_table

BASE, TEXT_AT, HEADER = 0x180000000, 0x1000, 0x80

Record = tuple[str, int, str, dict[str, str]]

KNOWN: list[Record] = [
    ("Not", 1, "", {"T": "bool"}),
    ("Cast", 13, "", {"T1": " ".join(set(BITS) - {"undefined", "uint4", "int4", "string"})}),
    ("Conv", 11, "", {"T": "float float16"}),
    ("NhwcConv", 1, "com.microsoft", {"T": "float float16"}),
    ("Erf", 13, "", {"T": "float float16"}),
]


def library(records: list[Record]) -> bytes:
    """A 64-bit Windows library of one section that holds these records as the linker would write them."""
    words: dict[str, int] = {}
    data = bytearray(b"\0")

    def word(text: str) -> int:
        if text not in words:
            words[text] = len(data)
            data.extend(text.encode() + b"\0")
        return BASE + TEXT_AT + words[text]

    def put(content: bytes) -> int:
        data.extend(b"\0" * (-len(data) % 8))
        data.extend(content)
        return BASE + TEXT_AT + len(data) - len(content)

    rows = b""
    for name, since, domain, types in records:
        pointers = [word(each) for each in types]
        names = put(struct.pack(f"<{len(pointers)}Q", *pointers))
        masks = [sum(1 << BITS.index(kind) for kind in kinds.split()) for kinds in types.values()]
        sets = put(struct.pack(f"<{len(masks)}Q", *masks))
        row = bytearray(RECORD)
        struct.pack_into("<3Q", row, 0, word(name), since, word(domain))
        struct.pack_into("<4Q", row, 80, len(types), names, len(types), sets)
        rows += bytes(row)
    put(b"\0" * RECORD + rows + b"\0" * RECORD)
    file = bytearray(0x400)
    file[:2] = b"MZ"
    struct.pack_into("<I", file, 0x3C, HEADER)
    struct.pack_into("<H", file, HEADER + 6, 1)
    struct.pack_into("<H", file, HEADER + 20, 240)
    struct.pack_into("<Q", file, HEADER + 48, BASE)
    struct.pack_into("<4I", file, HEADER + 24 + 240 + 8, len(data), TEXT_AT, len(data), len(file))
    return bytes(file + data)


def wheel(folder: Path, content: bytes) -> Path:
    path = folder / "onnxruntime_directml-9.9-cp311-cp311-win_amd64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(LIBRARY, content)
    return path


def test_directmls_kernels_are_read_out_of_a_library_that_cannot_run_here(tmp_path: Path) -> None:
    found = {
        (domain, name, first): {key: " ".join(sorted(value)) for key, value in types.items()}
        for domain, name, first, _, types in directml_kernels(wheel(tmp_path, library(KNOWN)))
    }
    assert found == {
        (domain, name, since): {key: " ".join(sorted(value.split())) for key, value in types.items()}
        for name, since, domain, types in KNOWN
    }


def test_another_meaning_of_the_bits_is_an_error_and_no_wrong_table(tmp_path: Path) -> None:
    shifted = [("Not", 1, "", {"T": "float16"}), *KNOWN[1:]]
    with pytest.raises(SystemExit, match=r"Not would take \['float16'\], not \['bool'\]"):
        directml_kernels(wheel(tmp_path, library(shifted)))
    with pytest.raises(SystemExit, match="nothing points to NhwcConv"):
        directml_kernels(wheel(tmp_path, library([row for row in KNOWN if row[0] != "NhwcConv"])))
    with pytest.raises(SystemExit, match="no Windows library"):
        directml_kernels(wheel(tmp_path, b"\x7fELF" + bytes(1000)))


DOCUMENT = """# Supported ONNX Operators

TensorRT 10.15 supports operators in the inclusive range of opset 9 to opset 24. Latest information can be found there.

| Operator                  | Supported  | Supported Types | Restrictions |
|---------------------------|------------|-----------------|--------------|
| Abs                       | Y          | FP32, FP16, BF16, INT32, INT64 |
| Acos                      | Y          | FP32, FP16, BF16 |
| AffineGrid                | N          |
| And                       | Y          | BOOL |
| Cast                      | Y          | FP32, FP16, BF16, INT32, INT64, UINT8, BOOL |    |
| DFT                       | N          |
| EyeLike                   | Y          | FP32, FP16, BF16, INT32, INT64, BOOL | `input` must have static dimensions
| Floor                     | Y          | FP32, FP16, BF16|
| NonZero                   | Y          | FP32, FP16 |
"""


def test_tensorrts_document_gives_the_rows_of_the_table() -> None:
    release, opset, rows = tensorrt_kernels(DOCUMENT)
    table = kernel_table("TensorrtExecutionProvider")
    assert (f"TensorRT {release}", opset) == (table.version, table.opset)
    assert sorted(rows) == ["Abs", "Acos", "And", "Cast", "EyeLike", "Floor", "NonZero"]
    for operator, [[_, _, types]] in rows.items():
        assert set(types["0"].split()) == table.kernels[operator][0].types["0"] | (
            {"double"} if "float" in types["0"] else set()
        )
    assert not {"AffineGrid", "DFT"} & set(table.kernels)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("| Abs | Y | FP32, FP12 |", "Abs takes FP12"),
        ("| Abs | perhaps | FP32 |", "Abs is neither supported nor not: perhaps"),
    ],
)
def test_a_line_that_is_not_understood_is_an_error(line: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        tensorrt_kernels(f"{DOCUMENT}{line}\n")


def test_migraphx_looks_at_names_and_not_at_domains() -> None:
    taken = migraphx_kernels({"com.microsoft.Gelu": True, "com.microsoft.BiasAdd": False, "Foo": None}, {"Gelu", "Foo"})
    assert taken == {"com.microsoft.Gelu", "Gelu"} | READ


def test_the_shipped_tables_hold_what_the_binaries_say() -> None:
    """Facts of the wheels that the fusions per target rest on; each was read in a binary and asked of it."""
    directml, migraphx = kernel_table("DmlExecutionProvider"), kernel_table("MIGraphXExecutionProvider")
    microsoft = "com.microsoft."
    assert {microsoft + name for name in ("NhwcConv", "GroupNorm", "BiasSplitGelu", "BiasAdd", "QuickGelu")} <= set(
        directml.kernels
    )
    assert microsoft + "SkipGroupNorm" not in directml.kernels
    assert {microsoft + name for name in ("NhwcConv", "GroupNorm", "MultiHeadAttention")} <= set(migraphx.kernels)
    assert not {microsoft + name for name in ("SkipGroupNorm", "BiasSplitGelu", "BiasAdd")} & set(migraphx.kernels)
    assert "1.24.4" in directml.version
    assert "1.27.1" in migraphx.version


def qnn_wheel(folder: Path, data: bytes) -> Path:
    path = folder / "onnxruntime_qnn-9.9-cp311-cp311-win_amd64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(QNN_LIBRARY, data)
    return path


def test_qnns_operators_are_the_names_that_lie_together(tmp_path: Path) -> None:
    names = [*sorted(QNN_KNOWN), "GroupNormalization", "QuickGelu", "NotAnOperator", "MatMul"]
    together = b"\0".join(name.encode() for name in names)
    data = b"MZ\0Erf\0Softmax\0" + bytes(9000) + b"\0" + together + b"\0" + bytes(9000) + b"\0Trilu\0"
    found = qnn_kernels(qnn_wheel(tmp_path, data))
    assert set(found) == QNN_KNOWN | {"GroupNormalization", "com.microsoft.QuickGelu"}
    with pytest.raises(SystemExit, match="LayerNormalization are not where the other operators are"):
        qnn_kernels(qnn_wheel(tmp_path, data.replace(b"LayerNormalization\0", b"")))


def test_what_windows_mls_providers_are_known_to_take_is_in_their_tables() -> None:
    qnn, vitisai = kernel_table("QNNExecutionProvider"), kernel_table("VitisAIExecutionProvider")
    assert {"LayerNormalization", "InstanceNormalization", "MatMul", "Resize"} <= set(qnn.kernels)
    assert "Conv" in qnn.unknown and "Conv" not in qnn.kernels, "its name is too short to be found in the library"
    assert not vitisai.kernels and {"Conv", "MatMul"} <= vitisai.unknown
    rtx = kernel_table("NvTensorRTRTXExecutionProvider")
    assert {"Conv", "MatMul", "InstanceNormalization", "LayerNormalization", "Resize", "Softmax"} <= set(rtx.kernels)
    assert "com.microsoft.MultiHeadAttention" not in rtx.kernels


def test_a_plugins_answers_make_the_rows_of_its_table() -> None:
    halves = {"T": ["float", "float16"]}
    answers = [
        ["", "Abs", 6, halves],
        ["", "Abs", 13, halves],
        ["", "Clip", 11, halves],
        ["", "Clip", 12, {"T": ["int32", "float"]}],
        ["", "Loop", 16, None],
        ["", "GroupNormalization", 21, False],
        ["com.microsoft", "BiasAdd", 1, halves],
    ]
    rows, unknown = placed_rows(answers)
    assert rows == {
        "Abs": [[[6, 13], None, {"T": "float float16"}]],
        "Clip": [[11, None, {"T": "float float16"}], [12, None, {"T": "float int32"}]],
        "Constant": [[1, "any", {}]],
        "com.microsoft.BiasAdd": [[1, None, {"T": "float float16"}]],
    }
    assert unknown == "Loop", "what was refused has no kernel, and that is known"


def test_webgpus_table_has_what_its_workflows_fuse_and_nothing_that_they_switch_off() -> None:
    kernels = kernel_table("WebGpuExecutionProvider").kernels
    there = ("Attention", "BiasGelu", "Gelu", "MultiHeadAttention", "QuickGelu", "SkipLayerNormalization")
    assert {f"com.microsoft.{name}" for name in there} <= kernels.keys()
    assert not {f"com.microsoft.{name}" for name in ("GroupNorm", "SkipGroupNorm", "NhwcConv")} & kernels.keys()
    assert kernels["MatMul"][0].types["T"] == {"float", "float16"}, "no bfloat16"
