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
)
"""The packages that bring ONNX Runtime: one per environment, since they overwrite each other's files."""

CUDA_PROVIDER = "CUDAExecutionProvider"

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
    needs_cuda: CUDA's libraries must be found, cuDNN too, which is otherwise missed only at the first convolution.
    """

    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    with_providers: tuple[str, ...] = ()
    memory_pattern: bool = True
    static_shapes: bool = False
    folded: bool = False
    profiles: bool = False
    needs_cuda: bool = False


@dataclass(frozen=True)
class Plugin:
    """A package that brings a provider as a library of its own, which ONNX Runtime loads beside any of its packages.

    module: has `get_library_path`. system: what it needs of the system, in words.
    """

    distribution: str
    module: str
    system: str


@dataclass(frozen=True)
class Target:
    """A target that workflows can name.

    providers: (execution provider, first ORT version or None, last ORT version or None), the best first.
    package: the distribution that brings the provider; for a machine that lacks it.
    platform: the one `sys.platform` that the provider exists for, or None.
    bfloat16: whether the provider runs transformers in bfloat16.
    plugin: where the provider is none of ONNX Runtime's own; `package` is then the ONNX Runtime beside it.
    """

    name: str
    title: str
    providers: tuple[tuple[str, str | None, str | None], ...]
    package: str
    session: SessionSettings = field(default_factory=SessionSettings)
    platform: str | None = None
    bfloat16: bool = False
    plugin: Plugin | None = None


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
        # Vulkan, Direct3D 12 or Metal, on any vendor's GPU. The provider turns convolutions to NHWC by itself.
        # https://github.com/microsoft/onnxruntime/tree/main/plugin-ep-webgpu
        Target(
            "webgpu",
            "WebGPU",
            (("WebGpuExecutionProvider", "1.24", None),),
            "onnxruntime",
            SessionSettings({"WebGpuExecutionProvider": _WEBGPU}, static_shapes=True, folded=True),
            plugin=Plugin(
                "onnxruntime-ep-webgpu",
                "onnxruntime_ep_webgpu",
                "a GPU and its driver; on Linux, the driver's Vulkan and libvulkan.so.1 (Debian: apt-get install libvulkan1)",
            ),
        ),
    )
}


def find_target(name: str, where: str) -> Target:
    """The target of this name, which stands at `where`. Raises UsageError when there is none."""
    if name not in TARGETS:
        raise UsageError(f"no target is named {name:.100}", where=where, remedy=f"Known: {', '.join(TARGETS)}.")
    return TARGETS[name]
