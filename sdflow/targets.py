"""The targets: each one's ONNX Runtime execution provider, its package, and its session options.

Workflows define what is built for a target, such as fusions: `targets` in a family's `workflows/base/`.
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
"""Packages that contain ONNX Runtime. An environment can have one only: they overwrite each other's files."""

CUDA_PROVIDER = "CUDAExecutionProvider"
WEBGPU_PROVIDER = "WebGpuExecutionProvider"

CPU_PROVIDER = "CPUExecutionProvider"
"""ONNX Runtime adds it to every session, for nodes that no other provider takes."""

CACHE_DIR = "{cache}"
"""Placeholder in an option's value for the directory of a provider's compiled models; see `SessionSettings`."""

TIMING_DIR = "{timing}"
"""Placeholder for the directory of TensorRT's kernel timings, which do not depend on the model."""


@dataclass(frozen=True)
class SessionSettings:
    """Session settings of a provider.

    options: provider -> its options, as ONNX Runtime takes them. An option whose value holds `{cache}` or `{timing}` is set
        only if the identity of the engine is known; see `sdflow.runtime.sessions.engine_cache`.
    entries: session configuration (onnxruntime_session_options_config_keys.h).
    with_providers: providers that may take nodes which the target's own leaves over, before the CPU does.
    memory_pattern: whether ONNX Runtime may plan memory ahead (`SessionOptions.enable_mem_pattern`).
    static_shapes: whether every input's shape must be fixed when the session is created.
    folded: whether shape arithmetic is folded before ONNX Runtime loads the graph, so that none runs on the CPU.
    profiles: whether the session needs the range of its input shapes, and is recreated for shapes outside.
    contexts: whether the provider compiles a model into one with EPContext nodes; these are stored in `CACHE_DIR`, too.
    needs_cuda: whether CUDA's libraries must be found, including cuDNN, whose absence shows only at the first
    convolution.
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

    providers: (execution provider, first ORT version or None, last ORT version or None), the preferred one first.
    package: the distribution that contains the provider; suggested on machines without it.
    platform: the only `sys.platform` that has the provider, or None.
    bfloat16: whether the provider runs transformers in bfloat16.
    plugins: provider -> the module that contains its library, for providers that ONNX Runtime loads as plugins;
        "windowsml" means the library in Windows ML's catalogue for this machine. See `sdflow.machine.plugins`.
    requires: a plugin's system requirements, in words.
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

    @property
    def nvidia_or_amd(self) -> bool:
        """Whether it always runs on an NVIDIA or AMD GPU."""
        return all(provider in _NVIDIA_OR_AMD for provider, _, _ in self.providers)


# HEURISTIC is as fast as EXHAUSTIVE, ONNX Runtime's own default, once loaded: a step of SD 1.5 5.19 ms with both, one of
# SDXL 27.9 ms of 28.6. cuDNN chooses half a second sooner and with less scratch memory (measured). DEFAULT is 12 times
# slower on a UNet. kSameAsRequested keeps the arena from doubling, as onnxruntime.transformers does for SD.
# fuse_conv_bias lets cuDNN add the bias inside the convolution: even after ConvBiasFusion, it saves 1 % of a step of
# SD 1.5 and 13 % of its decoder; the first image takes 1.3 s longer, while cuDNN compiles (measured).
# https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
_CUDA = {
    "cudnn_conv_algo_search": "HEURISTIC",
    "arena_extend_strategy": "kSameAsRequested",
    "fuse_conv_bias": "1",
}

# TensorRT chooses precision and fusions itself. Building an engine takes minutes. tests/runtime/tensorrt_options.json
# lists its options, as found in the library of onnxruntime-gpu 1.31.1.
# https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html
_TENSORRT = {
    "trt_fp16_enable": "1",
    "trt_engine_cache_enable": "1",
    "trt_engine_cache_path": CACHE_DIR,
    "trt_timing_cache_enable": "1",
    "trt_timing_cache_path": TIMING_DIR,
}

# MIGraphX compiles again for every new shape.
# https://onnxruntime.ai/docs/execution-providers/MIGraphX-ExecutionProvider.html
_MIGRAPHX = {"migraphx_model_cache_dir": CACHE_DIR}

# TensorRT for RTX compiles twice: the graph into an engine for a family of GPUs, stored in an EPContext model, and at
# the first run its kernels for this GPU, which it writes to a folder when the session ends. It keeps the graph's
# precisions. tests/runtime/rtx_options.json lists its options, from the wheel's tensorrt_rtx_provider_options.h.
_TENSORRT_RTX = {"nv_runtime_cache_path": CACHE_DIR}

_RTX_PROVIDER = "NvTensorRTRTXExecutionProvider"
"""The spelling of NVIDIA's library; Windows ML's catalogue has NvTensorRtRtxExecutionProvider."""

_NVIDIA_OR_AMD = (
    CUDA_PROVIDER,
    "TensorrtExecutionProvider",
    _RTX_PROVIDER,
    "MIGraphXExecutionProvider",
    "ROCMExecutionProvider",
)

# The providers in Windows ML's catalogue: for NVIDIA RTX, AMD Radeon, Intel, Qualcomm, AMD Ryzen AI. A machine is
# offered one or two of them.
# https://learn.microsoft.com/windows/ai/new-windows-ml/supported-execution-providers
_WINDOWS_ML = (
    _RTX_PROVIDER,
    "MIGraphXExecutionProvider",
    "OpenVINOExecutionProvider",
    "QNNExecutionProvider",
    "VitisAIExecutionProvider",
)
# Without it, operators on token ids fall back to the CPU.
_WEBGPU = {"enableInt64": "1"}

# Each session has its own threads. Idle ones spin, by default for a while after a run too, and would take cores from
# the next submodel.
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
        # DirectML supports neither memory patterns nor parallel execution, and compiles operators for fixed shapes.
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
        # Vulkan, Direct3D 12 or Metal, on any vendor's GPU. The provider converts convolutions to NHWC itself.
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
    """Return the target of this name. Raises UsageError at `where` if there is none."""
    if name not in TARGETS:
        raise UsageError(f"no target is named {name:.100}", where=where, remedy=f"Known: {', '.join(TARGETS)}.")
    return TARGETS[name]
