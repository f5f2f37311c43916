"""The targets: which ONNX Runtime execution provider runs each, from which package, and with which session options.

What is built for a target, its fusions above all, is for workflows to say: `targets` in a family's `workflows/base/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sdflow.errors import UsageError

ONNXRUNTIME_FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-directml",
    "onnxruntime-windowsml",
)
"""The packages that bring ONNX Runtime: one per environment, since they overwrite each other's files."""

CUDA_PROVIDER = "CUDAExecutionProvider"
WEBGPU_PROVIDER = "WebGpuExecutionProvider"

CPU_PROVIDER = "CPUExecutionProvider"
"""ONNX Runtime adds it to every session; what no other provider takes runs there."""

CACHE_DIR = "{cache}"
"""Stands in an option's value for the directory where a provider keeps what it compiles; see `SessionSettings`."""

TIMING_DIR = "{timing}"
"""The same for what TensorRT measured of kernels, which does not depend on the model."""


@dataclass(frozen=True)
class SessionSettings:
    """What a provider wants of a session.

    options: provider -> its options, as ONNX Runtime takes them. An option whose value holds `{cache}` or `{timing}` is set
        only where it is known what the engine is of; see `sdflow.runtime.sessions.engine_cache`.
    entries: of its configuration (onnxruntime_session_options_config_keys.h).
    with_providers: providers that may take what the target's own leaves over, before the CPU does.
    memory_pattern: whether ONNX Runtime may plan memory ahead (`SessionOptions.enable_mem_pattern`).
    static_shapes: every input's shape must be fixed when the session is created.
    folded: shape arithmetic is computed before ONNX Runtime has the graph, so that none of it is left for the CPU.
    profiles: the session is told between which shapes its inputs will be, and is made anew for others.
    contexts: the provider compiles a model into one whose nodes hold what it compiled (EPContext); `CACHE_DIR` is where such
        models lie, too.
    needs_cuda: CUDA's libraries must be found, cuDNN too, which is otherwise missed only at the first convolution.
    """

    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    with_providers: tuple[str, ...] = ()
    memory_pattern: bool = True
    static_shapes: bool = False
    folded: bool = False
    profiles: bool = False
    contexts: bool = False
    needs_cuda: bool = False


@dataclass(frozen=True)
class Target:
    """A target that workflows can name.

    providers: (execution provider, first ORT version or None, last ORT version or None), the best first.
    package: the distribution that brings the provider; for a machine that lacks it.
    platform: the one `sys.platform` that the provider exists for, or None.
    bfloat16: whether the provider runs transformers in bfloat16.
    plugins: provider -> the module that has its library, for providers that ONNX Runtime loads as plugins; "windowsml": the
        library is the one that Windows ML's catalogue has for this machine. See `sdflow.machine.plugins`.
    requires: what a plugin needs of the system, in words.
    """

    name: str
    title: str
    providers: tuple[tuple[str, str | None, str | None], ...]
    package: str
    session: SessionSettings = field(default_factory=SessionSettings)
    platform: str | None = None
    bfloat16: bool = False
    plugins: Mapping[str, str] = field(default_factory=dict)
    requires: str = ""


# EXHAUSTIVE is ONNX Runtime's own default; written down because DEFAULT is 12 times slower on a UNet (85 ms instead of
# 7, measured). kSameAsRequested keeps the arena from doubling, as in onnxruntime.transformers.models.stable_diffusion.
# fuse_conv_bias has cuDNN add the bias in the convolution, not in a kernel of its own: 4 % of a UNet and 10 % of a VAE
# decoder, measured, even behind ConvBiasFusion; the first run then takes up to 6 seconds more, for cuDNN to compile them.
# https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
_CUDA = {
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "arena_extend_strategy": "kSameAsRequested",
    "fuse_conv_bias": "1",
}

# TensorRT chooses precision and fusions itself. An engine takes minutes to build. Its options, as the library of
# onnxruntime-gpu 1.31.1 holds them, are in tests/runtime/tensorrt_options.json.
# https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html
_TENSORRT = {
    "trt_fp16_enable": "1",
    "trt_engine_cache_enable": "1",
    "trt_engine_cache_path": CACHE_DIR,
    "trt_timing_cache_enable": "1",
    "trt_timing_cache_path": TIMING_DIR,
}

# MIGraphX compiles anew for every shape it meets.
# https://onnxruntime.ai/docs/execution-providers/MIGraphX-ExecutionProvider.html
_MIGRAPHX = {"migraphx_model_cache_dir": CACHE_DIR}

# TensorRT for RTX compiles twice: the graph into an engine for a family of GPUs, which an EPContext model holds, and at the first
# run its kernels for this GPU, which it keeps in a folder when the session ends. It takes precisions as the graph has them. Its
# options, as the wheel's tensorrt_rtx_provider_options.h lists them, are in tests/runtime/rtx_options.json.
_TENSORRT_RTX = {"nv_runtime_cache_path": CACHE_DIR}

_RTX_PROVIDER = "NvTensorRTRTXExecutionProvider"
"""By the name that NVIDIA's library has; Windows ML's catalogue spells it NvTensorRtRtxExecutionProvider."""

# The providers of Windows ML's catalogue, by which machine has which: NVIDIA RTX, AMD Radeon, Intel, Qualcomm, AMD Ryzen AI. At
# most one or two are offered on a machine.
# https://learn.microsoft.com/windows/ai/new-windows-ml/supported-execution-providers
_WINDOWS_ML = (
    _RTX_PROVIDER,
    "MIGraphXExecutionProvider",
    "OpenVINOExecutionProvider",
    "QNNExecutionProvider",
    "VitisAIExecutionProvider",
)
# Without it, whatever computes with token ids falls to the CPU.
_WEBGPU = {"enableInt64": "1"}

# Each session has threads of its own. Those that wait for work spin, and by themselves go on for a while after a run: then they
# take the cores from the next submodel's.
# https://onnxruntime.ai/docs/performance/tune-performance/threading.html
_CPU = {"session.force_spinning_stop": "1"}

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "CPU", ((CPU_PROVIDER, None, None),), "onnxruntime", SessionSettings(entries=_CPU)),
        Target(
            "cuda",
            "NVIDIA CUDA",
            (("CUDAExecutionProvider", None, None),),
            "onnxruntime-gpu",
            SessionSettings({"CUDAExecutionProvider": _CUDA}, needs_cuda=True),
            bfloat16=True,
        ),
        Target(
            "tensorrt",
            "NVIDIA TensorRT",
            (("TensorrtExecutionProvider", None, None),),
            "onnxruntime-gpu",
            SessionSettings(
                {"TensorrtExecutionProvider": _TENSORRT, "CUDAExecutionProvider": _CUDA},
                with_providers=("CUDAExecutionProvider",),
                profiles=True,
                needs_cuda=True,
            ),
        ),
        Target(
            "rocm",
            "AMD ROCm",
            (("MIGraphXExecutionProvider", "1.23", None), ("ROCMExecutionProvider", None, "1.22")),
            "onnxruntime-migraphx",
            SessionSettings({"MIGraphXExecutionProvider": _MIGRAPHX}, static_shapes=True),
        ),
        # Memory patterns and parallel execution are not supported there, and operators compile for fixed shapes.
        # https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html
        Target(
            "directml",
            "Windows DirectML",
            (("DmlExecutionProvider", None, None),),
            "onnxruntime-directml",
            SessionSettings(memory_pattern=False, static_shapes=True),
            platform="win32",
        ),
        Target(
            "nv_tensorrt_rtx",
            "NVIDIA TensorRT for RTX",
            ((_RTX_PROVIDER, "1.24", None),),
            "onnxruntime-ep-nv-tensorrt-rtx",
            SessionSettings({_RTX_PROVIDER: _TENSORRT_RTX}, static_shapes=True, contexts=True),
            plugins={_RTX_PROVIDER: "onnxruntime_ep_nv_tensorrt_rtx"},
        ),
        Target(
            "windowsml",
            "Windows ML",
            tuple((provider, "1.24", None) for provider in _WINDOWS_ML),
            "windowsml",
            SessionSettings(
                {_RTX_PROVIDER: _TENSORRT_RTX, "MIGraphXExecutionProvider": _MIGRAPHX},
                static_shapes=True,
                contexts=True,
            ),
            platform="win32",
            plugins=dict.fromkeys(_WINDOWS_ML, "windowsml"),
        ),
        # Vulkan, Direct3D 12 or Metal, on any vendor's GPU. The provider turns convolutions to NHWC by itself.
        # https://github.com/microsoft/onnxruntime/tree/main/plugin-ep-webgpu
        Target(
            "webgpu",
            "WebGPU",
            ((WEBGPU_PROVIDER, "1.24", None),),
            "onnxruntime-ep-webgpu",
            SessionSettings({WEBGPU_PROVIDER: _WEBGPU}, static_shapes=True, folded=True),
            plugins={WEBGPU_PROVIDER: "onnxruntime_ep_webgpu"},
            requires="a GPU and its driver; on Linux, Vulkan with its loader libvulkan.so.1 (Debian: apt-get install libvulkan1)",
        ),
    )
}


def find_target(name: str, where: str) -> Target:
    """The target of this name, which stands at `where`. Raises UsageError when there is none."""
    if name not in TARGETS:
        raise UsageError(f"no target is named {name:.100}", where=where, remedy=f"Known: {', '.join(TARGETS)}.")
    return TARGETS[name]
