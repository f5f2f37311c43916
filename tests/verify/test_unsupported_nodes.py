"""A graph that a target cannot run as it is, is told from one that it can, without the target."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits, fits_elsewhere
from sdflow.verify.finding import Finding, errors
from sdflow.verify.kernels import kernel_table
from tests.verify.small_graphs import F16, F32, F64, I32, I64, MS, U8, model, node, one, port, unet_block
from tests.verify.told import Told, assert_told
from tests.weights.conftest import Builder

NHWC = ["batch", "height", "width", 320]
TOKENS = ["batch", "sequence", 320]
GROUPS = {"groups": 32, "epsilon": 1e-5, "activation": 0}

# SMALL_UNET of tests/weights is 32 and 64 channels wide: CUDA's kernels rightly refuse these two there.
ONLY_SD_WIDTHS = ("BiasSplitGelu", "BiasAdd")


def of_level(findings: list[Finding], level: str) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]


def misfit(operator: str, *what: str, do: str) -> Told:
    """An error of a kernel or of a condition that it has, at the one node of a graph."""
    return Told("error", "kernel", "unet", f"the_{operator}", (operator, *what), (do,))


def condition(operator: str, *what: str, do: str) -> Told:
    return replace(misfit(operator, *what, do=do), check="condition")


# Good graphs


def test_a_fused_block_of_sd15_fits_cuda_and_rocms_own_provider() -> None:
    assert errors(fits(unet_block(), TARGETS["cuda"])) == []
    assert errors(fits(unet_block(), TARGETS["rocm"], provider="ROCMExecutionProvider")) == []


@pytest.mark.parametrize(
    "target",
    ["cuda", "directml", pytest.param("rocm", marks=pytest.mark.slow), pytest.param("cpu", marks=pytest.mark.slow)],
)
def test_the_small_unet_of_each_target_fits_it(target: str, built: Builder) -> None:
    structure = onnx.load(built.structure("unet", target) / "model.onnx", load_external_data=False)
    found = errors(fits(structure, TARGETS[target], "unet"))
    assert [finding for finding in found if finding.check != "condition"] == []
    refused = [operator for operator in ONLY_SD_WIDTHS for finding in found if finding.what.startswith(f"{operator} ")]
    assert refused == (["BiasSplitGelu"] * 2 + ["BiasAdd"] * 2 if target == "cuda" else []), "at each of the two widths"
    assert len(found) == len(refused)


def test_the_plain_conversions_fit_the_cpu_and_tensorrt(tiny_pipeline: Path) -> None:
    for path in sorted(tiny_pipeline.glob("*/model.onnx")):
        graph = onnx.load(path, load_external_data=False)
        for target in ("cpu", "tensorrt"):
            assert errors(fits(graph, TARGETS[target], path.parent.name)) == []


@pytest.mark.parametrize("target", ["nv_tensorrt_rtx", "windowsml"])
def test_the_plain_conversions_fit_every_provider_that_a_machine_may_have(target: str, tiny_pipeline: Path) -> None:
    for path in sorted(tiny_pipeline.glob("*/model.onnx")):
        graph = onnx.load(path, load_external_data=False)
        assert errors(fits(graph, TARGETS[target], path.parent.name)) == []
        assert fits_elsewhere(graph, TARGETS[target], path.parent.name) == []


def test_what_one_of_windows_mls_providers_lacks_is_a_warning_that_names_it() -> None:
    nodes = [node("QuickGelu", "x", "a"), node("SkipLayerNormalization", "a a g", "y")]
    gamma = helper.make_tensor("g", F16, [4], np.ones(4, np.float16))
    graph = model(nodes, [port("x", [1, 4, 4])], [port("y", None)], [gamma])
    told = fits_elsewhere(graph, TARGETS["windowsml"], "unet")
    assert {each.level for each in told} == {"warning"}
    assert any("SkipLayerNormalization has no QNN kernel" in each.what for each in told)
    assert not any("MIGraphX" in each.what for each in told), "it has both"
    assert fits_elsewhere(graph, TARGETS["rocm"], "unet") == []


def test_what_folds_into_a_constant_needs_no_kernel() -> None:
    nodes = [node("Trilu", "mask", "tri", domain=""), node("Add", "x tri", "y", domain="")]
    mask = helper.make_tensor("mask", F16, [1, 1], np.zeros((1, 1), np.float16))
    graph = model(nodes, [port("x", ["batch", 1])], [port("y", None)], [mask])
    assert errors(fits(graph, TARGETS["tensorrt"])) == []


def test_what_computes_an_output_that_nobody_reads_is_a_warning(built: Builder) -> None:
    """CLIP's pooled output: its ArgMax of int32 runs on the CPU."""
    structure = onnx.load(built.structure("text_encoder", "cuda") / "model.onnx", load_external_data=False)
    found = fits(structure, TARGETS["cuda"], "text_encoder", read=["last_hidden_state"])
    assert errors(found) == []
    assert_told(
        of_level(found, "warning"),
        Told("warning", "kernel", "text_encoder", "/ArgMax", ("ArgMax", "CUDA", "int32", "float16"), ("output", "CPU")),
    )


def blockwise(bits: int, zeros: list[int]) -> ModelProto:
    """A product with weights in blocks of 32."""
    product = node("MatMulNBits", "x w scales zeros", "y", K=320, N=320, bits=bits, block_size=32)
    weights = {"w": ([320, 10, 4 * bits], U8), "scales": ([320, 10], F16), "zeros": (zeros, U8)}
    return one(product, {"x": (TOKENS, F16)}, **weights)


# Planted faults, each with what must be told

FAULTS: dict[str, tuple[ModelProto, str, Told]] = {
    "an operator that DirectML lacks": (
        one(
            node("SkipGroupNorm", "x gamma beta x", "y", channels_last=0, **GROUPS),
            {"x": (["batch", 320, "height", "width"], F16)},
            gamma=([320], F16),
            beta=([320], F16),
        ),
        "directml",
        misfit("SkipGroupNorm", "DirectML", do="enable_skip_group_norm: false"),
    ),
    "an operator that MIGraphX lacks": (
        one(node("BiasSplitGelu", "x bias", "y"), {"x": (["batch", "n", 2560], F16)}, bias=([2560], F16)),
        "rocm",
        misfit("BiasSplitGelu", "MIGraphX", do="enable_bias_splitgelu: false and enable_bias_add: false"),
    ),
    "an operator that the CPU lacks": (
        one(node("NhwcConv", "x w", "y"), {"x": (NHWC, F32)}, F32, w=([320, 3, 3, 320], F32)),
        "cpu",
        misfit("NhwcConv", "CPU", do="enable_nhwc_conv: false"),
    ),
    "any fused operator for TensorRT": (
        one(node("QuickGelu", "x", "y"), {"x": (TOKENS, F16)}),
        "tensorrt",
        misfit("QuickGelu", "TensorRT", do="OrtTransformersOptimization"),
    ),
    "float16 for the CPU": (
        one(
            node("Attention", "x w b", "y", num_heads=8),
            {"x": (TOKENS, F16)},
            w=([320, 960], F16),
            b=([960], F16),
        ),
        "cpu",
        misfit("Attention", "CPU", "float16", "float", do="OnnxFloatToFloat16"),
    ),
    "a type that no kernel takes": (
        one(node("BiasAdd", "x bias x", "y"), {"x": (TOKENS, F64)}, F64, bias=([320], F64)),
        "cuda",
        misfit("BiasAdd", "CUDA", "double", "X", "float16", do="allow_fallback: true"),
    ),
    "integers where the device has floats only": (
        one(node("ArgMax", "ids", "y", domain="", axis=-1), {"ids": (["batch", "sequence"], I32)}, I64),
        "cuda",
        misfit("ArgMax", "CUDA", "int32", "data", "float16", do="allow_fallback: true"),
    ),
    "a width that BiasAdd does not take": (
        one(node("BiasAdd", "x bias x", "y"), {"x": (["batch", "n", 768], F16)}, bias=([768], F16)),
        "cuda",
        condition("BiasAdd", "CUDA", "320, 640 and 1280", "768", do="enable_bias_add: false"),
    ),
    "a width that BiasSplitGelu does not take": (
        one(node("BiasSplitGelu", "x bias", "y"), {"x": (["batch", "n", 3072], F16)}, bias=([3072], F16)),
        "cuda",
        condition(
            "BiasSplitGelu",
            "CUDA",
            "2560, 5120 and 10240",
            "3072",
            do="enable_bias_splitgelu: false and enable_bias_add: false",
        ),
    ),
    "BiasSplitGelu in float16 for WebGPU": (
        one(node("BiasSplitGelu", "x bias", "y"), {"x": (["batch", "n", 2560], F16)}, bias=([2560], F16)),
        "webgpu",
        condition(
            "BiasSplitGelu",
            "WebGPU",
            "float only",
            "float16",
            do="enable_bias_splitgelu: false and enable_bias_add: false",
        ),
    ),
    "GroupNorm in NCHW on CUDA": (
        one(
            node("GroupNorm", "x gamma beta", "y", channels_last=0, **GROUPS),
            {"x": (["batch", 320, "height", "width"], F16)},
            gamma=([320], F32),
            beta=([320], F32),
        ),
        "cuda",
        condition("GroupNorm", "CUDA", "NHWC", "NCHW", do="group_norm_channels_last: true"),
    ),
    "GroupNorm's scale in float16 on CUDA": (
        one(
            node("GroupNorm", "x gamma beta", "y", channels_last=1, **GROUPS),
            {"x": (NHWC, F16)},
            gamma=([320], F16),
            beta=([320], F32),
        ),
        "cuda",
        condition("GroupNorm", "CUDA", "gamma", "float", "float16", do="GroupNorm out of force_fp16_inputs"),
    ),
    "weights in 8 bits by blocks for MIGraphX": (
        blockwise(8, [320, 10]),
        "rocm",
        condition("MatMulNBits", "MIGraphX", "4 bits only", "8", do="leave QuantizeInt4 out"),
    ),
    "zero points by rows for MIGraphX": (
        blockwise(4, [320, 5]),
        "rocm",
        condition("MatMulNBits", "MIGraphX", "one dimension", "2", do="leave QuantizeInt4 out"),
    ),
    "packed attention for the CPU": (
        one(node("MultiHeadAttention", "x", "y", num_heads=8), {"x": (["batch", "n", 8, 3, 40], F32)}, F32),
        "cpu",
        condition("MultiHeadAttention", "CPU", "packed q, k and v", do="enable_packed_qkv: false"),
    ),
    "packed keys and values for the CPU": (
        one(
            node("MultiHeadAttention", "q kv", "y", num_heads=8),
            {"q": (TOKENS, F32), "kv": (["batch", "n", 8, 2, 40], F32)},
            F32,
        ),
        "cpu",
        condition("MultiHeadAttention", "CPU", "packed k and v", do="enable_packed_kv: false"),
    ),
    "a version of an operator that came after the provider": (
        one(
            node("Conv", "x w", "y", domain=""),
            {"x": (["batch", 4, "height", "width"], F16)},
            opset=22,
            w=([320, 4, 3, 3], F16),
        ),
        "directml",
        misfit("Conv", "DirectML", "22", do="target_opset so that the operator's version is at most 11"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    graph, target, told = FAULTS[fault]
    assert [] in [told.missing(finding) for finding in fits(graph, TARGETS[target], "unet")]


def test_migraphx_takes_four_bits_with_flat_zero_points() -> None:
    assert errors(fits(blockwise(4, [1600]), TARGETS["rocm"], "unet")) == []
    assert errors(fits(blockwise(8, [320, 10]), TARGETS["cuda"], "unet")) == []


def test_webgpu_takes_bias_split_gelu_in_float32() -> None:
    graph = one(node("BiasSplitGelu", "x bias", "y"), {"x": (["batch", "n", 2560], F32)}, F32, bias=([2560], F32))
    assert errors(fits(graph, TARGETS["webgpu"], "unet")) == []


def test_equal_findings_are_one_with_a_count() -> None:
    twice = [node("QuickGelu", "x", "h"), node("QuickGelu", "h", "y")]
    found = errors(fits(model(twice, [port("x", TOKENS)], [port("y", None)]), TARGETS["tensorrt"], "unet"))
    assert_told(found, replace(misfit("QuickGelu", "TensorRT", do="OrtTransformersOptimization"), count=2))
    assert str(found[0]).startswith("unet: the_QuickGelu (and 1 more): ")


def test_what_the_table_does_not_tell_is_a_warning_and_no_claim() -> None:
    ports = {"x": (["n", 4, "h", "w"], F32), "grid": (["n", "a", "b", 2], F32)}
    graph = one(node("GridSample", "x grid", "y", domain=""), ports, F32)
    found = fits(graph, TARGETS["directml"], "unet")
    assert errors(found) == []
    what = ("DirectML", "GridSample", "does not say whether", "onnxruntime-directml 1.24.4")
    assert_told(of_level(found, "warning"), Told("warning", "kernel", "unet", "the_GridSample", what, ("sdflow run",)))


def test_an_operator_that_onnx_runtime_expands_is_a_warning() -> None:
    """GroupNormalization of the standard is a function: no provider has a kernel, and sessions run it nevertheless."""
    made = node("GroupNormalization", "x scale bias", "y", domain="", num_groups=32)
    graph = one(made, {"x": (["batch", 320, 8, 8], F32)}, F32, opset=21, scale=([320], F32), bias=([320], F32))
    for target in ("cpu", "cuda"):
        found = fits(graph, TARGETS[target], "unet")
        assert errors(found) == []
        told = misfit("GroupNormalization", target.upper(), do="expands")
        assert_told(of_level(found, "warning"), replace(told, level="warning"))


def test_functions_of_the_model_are_looked_into() -> None:
    body = helper.make_function(
        "own", "Double", ["a"], ["b"], [node("BiasAdd", "a a a", "b")], [helper.make_opsetid(MS, 1)]
    )
    graph = one(node("Double", "x", "y", domain="own"), {"x": (TOKENS, F16)})
    graph.opset_import.add(domain="own", version=1)
    graph.functions.append(body)
    assert errors(fits(graph, TARGETS["directml"])) == []
    [found] = errors(fits(graph, TARGETS["rocm"]))
    assert ("BiasAdd" in found.what, "MIGraphX" in found.what) == (True, True)


def test_shape_arithmetic_is_an_obstacle_to_cuda_graphs_and_no_misfit() -> None:
    nodes = [
        node("Shape", "x", "s", domain=""),
        node("Gather", "s zero", "n", domain=""),
        node("Unsqueeze", "n axis", "n1", domain=""),
        node("Concat", "n1 rest", "target", domain="", axis=0),
        node("Reshape", "x target", "y", domain=""),
    ]
    constants = [helper.make_tensor(name, I64, dims, values) for name, dims, values in (
        ("zero", [], [0]), ("axis", [1], [0]), ("rest", [1], [-1])
    )]  # fmt: skip
    graph = model(nodes, [port("x", TOKENS)], [port("y", None)], constants)
    assert errors(fits(graph, TARGETS["cuda"])) == []
    do = ("add_free_dimension_override_by_name",)
    assert_told(
        of_level(fits(graph, TARGETS["cuda"], "unet"), "note"),
        Told("note", "static-shape", "unet", "the_Shape", ("no CUDA graph",), do, count=4),
    )
    assert fits(graph, TARGETS["cpu"], "unet") == []


def test_an_axis_that_no_session_can_fix_is_a_warning() -> None:
    graph = one(node("Relu", "x", "y", domain=""), {"x": (["batch", None], F16)})
    found = fits(graph, TARGETS["directml"], "unet")
    assert_told(found, Told("warning", "static-shape", "unet", "x", ("axis 1",), ("dynamic_axes",)))


# The tables


def test_the_cpu_table_is_that_of_the_installed_onnx_runtime() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    table = kernel_table("CPUExecutionProvider")
    assert table.version.split()[1].split(".")[:2] == version("onnxruntime").split(".")[:2], (
        "benchmarks/providers/kernel_tables.py cpu"
    )
    known = {
        f"{kernel.domain}.{kernel.op_name}".lstrip(".")
        for kernel in get_all_opkernel_def()
        if kernel.provider == table.provider and kernel.domain in ("", "com.microsoft")
    }
    assert known == table.kernels.keys()


@pytest.mark.parametrize("operator", ["com.microsoft.NhwcConv", "com.microsoft.BiasAdd", "com.microsoft.GroupNorm"])
def test_onnx_runtime_itself_refuses_what_the_cpu_table_lacks(operator: str) -> None:
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByOrt

    weights = {
        "NhwcConv": ("x w", {}, {"w": np.zeros((8, 1, 1, 8), np.float32)}),
        "BiasAdd": ("x c x", {}, {"c": np.zeros(8, np.float32)}),
        "GroupNorm": ("x c c", {"groups": 2, "activation": 0}, {"c": np.zeros(8, np.float32)}),
    }
    name = operator.rsplit(".", 1)[1]
    inputs, attributes, values = weights[name]
    graph = model(
        [node(name, inputs, "y", **attributes)],
        [port("x", [1, 4, 4, 8] if name != "BiasAdd" else [1, 4, 8], F32)],
        [helper.make_tensor_value_info("y", F32, None)],
        [onnx.numpy_helper.from_array(array, key) for key, array in values.items()],
    )
    assert operator not in kernel_table("CPUExecutionProvider").kernels
    with pytest.raises(NotImplementedByOrt, match=f"Could not find an implementation for {name}|kernel for {operator}"):
        ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("fault", ["packed attention for the CPU", "packed keys and values for the CPU"])
def test_onnx_runtime_itself_refuses_packed_attention_on_the_cpu(fault: str) -> None:
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    graph, _, told = FAULTS[fault]
    assert_told(errors(fits(graph, TARGETS["cpu"], "unet")), told)
    shapes = {"x": (1, 4, 8, 3, 40), "q": (1, 4, 320), "kv": (1, 4, 8, 2, 40)}
    inputs = {info.name: np.zeros(shapes[info.name], np.float32) for info in graph.graph.input}
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(RuntimeException, match="not implemented for CPU"):
        session.run(None, inputs)


@pytest.mark.parametrize("target", TARGETS)
def test_every_provider_of_every_target_has_a_table_with_its_source(target: str) -> None:
    for provider, _, _ in TARGETS[target].providers:
        table = kernel_table(provider)
        assert table.provider == provider
        assert table.source
        assert table.version
        assert "MatMul" in table.kernels or table.unknown, "VitisAI's are not known"
        assert all(condition.source for condition in table.conditions)
