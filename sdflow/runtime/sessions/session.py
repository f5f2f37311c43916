"""ONNX Runtime sessions: one submodel on one target's execution provider, or an error; never on another instead."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdflow.errors import SlowerWarning, TargetUnavailableError, VerificationError
from sdflow.machine.onnx_runtime import onnxruntime_errors
from sdflow.machine.plugins import plugins_of
from sdflow.machine.providers import onnxruntime_for
from sdflow.machine.webgpu import adapter_failure
from sdflow.onnx_model.float8 import DOMAIN, has_float8
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.kernels.float8 import NEEDS, float8_library, with_float8
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.library import kernel_library
from sdflow.runtime.kernels.parts import parts_in
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.cannot_run import MOST_SAID, cannot_run
from sdflow.runtime.sessions.contexts import load_with_context
from sdflow.runtime.sessions.cublas import small_workspaces
from sdflow.runtime.sessions.dimensions import folded, free_dimensions, profile_of_graph
from sdflow.runtime.sessions.engine_cache import (
    TENSORRT,
    EngineFolders,
    Profile,
    Shapes,
    engine_folders,
    keeps_engines,
)
from sdflow.runtime.sessions.engine_share import fetch_engines, has_engines, push_folder, remote_of_engines
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.runtime.sessions.webgpu_angles import with_right_angles
from sdflow.runtime.sessions.webgpu_attention import with_right_attention
from sdflow.targets import CACHE_DIR, CUDA_PROVIDER, TIMING_DIR, WEBGPU_PROVIDER, Target

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    import torch

# What ONNX Runtime says when a node is not on the provider or the graph has control flow.
_NOT_CAPTURED = "cannot use the graph capture feature"

DAMAGED = "The folder is damaged: build the pipeline again, sdflow run."


@dataclass(frozen=True)
class LoadOptions:
    """How sessions are made, the same for all of a pipeline.

    engine_cache: where a provider may keep what it compiles; None: in the user's folder (`sdflow.runtime.sessions.engine_cache`).
    threads: of the CPU, for one operator; None leaves it to the tuning, then to ONNX Runtime.
    tuning: choices on top of the target's settings.
    stream: the CUDA stream that everything is queued on, as an address; None: one of the session's own.
    profile: prefix of a profile that `end_profiling` writes.
    built_for: the target of the pipeline's folder, which may be another; for messages.
    """

    engine_cache: Path | None = None
    threads: int | None = None
    tuning: Tuning = UNTUNED
    stream: int | None = None
    profile: Path | None = None
    built_for: str | None = None


PLAIN = LoadOptions()


def create_session(
    model: Path,
    target: Target,
    options: LoadOptions = PLAIN,
    *,
    shapes: Shapes | None = None,
    graph: onnx.ModelProto | None = None,
    weights: Mapping[str, onnxruntime.OrtValue] | None = None,
    live: Mapping[str, torch.Tensor] = MappingProxyType({}),
    capture: bool = False,
    artifact: str | None = None,
    profile: Profile | None = None,
) -> onnxruntime.InferenceSession:
    """Load `model` on the target's provider.

    shapes: the inputs' shapes in use; needed by targets with static shapes, and fixed there.
    graph: to load in its place; its large weights lie beside `model`. On CUDA, `sdflow.runtime.kernels` compute what of
    it they can; its shapes must be fixed for that.
    weights: initializers that are there already and are taken instead of those in the model's data file.
    live: weights that are inputs of the graph (`sdflow.runtime.sessions.live_weights`), and where they lie.
    artifact: the digest of the model and its weights; without it, a provider keeps nothing of what it compiles. Nor does it
    where `graph` takes the model's place.
    profile: between which shapes the inputs will be; for targets that want to know.
    capture: allow CUDA graphs (run option `gpu_graph_id`), where the provider has them and every node is on it; the
    session's provider options tell. A graph that cannot be captured runs without, and a warning says so.
    Raises TargetUnavailableError when the provider is missing or cannot be loaded, VerificationError when it cannot
    run this graph.
    """
    ort, provider = onnxruntime_for(target)
    if target.session.needs_cuda:
        _load_cuda(ort)
    if provider == TENSORRT:
        _load_tensorrt()
    session_options = _session_options(ort, target, options)
    # Before ONNX Runtime has it, which would wait for a pipe, fill the memory, or crash.
    read = read_graph(model) if graph is None else graph
    if provider == CUDA_PROVIDER and has_float8(read):  # they need our operators, whatever the tuning says
        session_options.register_custom_ops_library(str(float8_library()))
        read = graph = with_float8(read, hopper=on_hopper())
    devices = plugins_of(ort, target).devices.get(provider, [])
    if target.session.folded:
        read = graph = folded(read, shapes or {}, str(model))
    if provider == WEBGPU_PROVIDER:
        with_right_attention(read, ort, target, devices)
        with_right_angles(read)
    if graph is not None:
        folder = str(model.parent)
        session_options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if target.session.static_shapes:
        for name, size in free_dimensions(read, shapes or {}, str(model)).items():
            session_options.add_free_dimension_override_by_name(name, size)
    for name, value in (weights or {}).items():
        session_options.add_initializer(name, value)

    wanted = [provider, *(p for p in target.session.with_providers if p in ort.get_available_providers())]
    engines = None
    if artifact is not None and graph is None and keeps_engines(target):
        key = Profile.of(shapes) if target.session.contexts and shapes is not None else profile
        engines = engine_folders(options.engine_cache, target, provider, artifact, key, devices[0] if devices else None)
    providers = {name: provider_options(target, name, engines) for name in wanted}
    if CUDA_PROVIDER in providers and has_planar_bias(read):
        providers[CUDA_PROVIDER]["fuse_conv_bias"] = "0"
    if profile is not None and provider == TENSORRT:
        providers[provider] |= profile_of_graph(profile, read, str(model)).options()
    if target.session.needs_cuda and options.stream is not None:
        for each in providers.values():
            each["user_compute_stream"] = str(options.stream)
    options.tuning.apply(session_options, providers[provider], ort)
    if options.threads is not None:
        session_options.intra_op_num_threads = options.threads
    if graph is not None and provider == CUDA_PROVIDER and options.tuning.own_kernels:
        graph = _with_own_kernels(graph, session_options)
    if capture and options.tuning.cuda_graphs and provider == CUDA_PROVIDER:
        providers[CUDA_PROVIDER]["enable_cuda_graph"] = "1"

    if devices:
        session_options.add_provider_for_devices(devices[:1], providers[provider])

    remote = None if engines is None else remote_of_engines()
    if engines is not None and remote is not None:
        fetch_engines(engines.engines, remote)
    had = engines is None or has_engines(engines.engines)

    def load() -> Any:
        # The CPU is not listed where the target is another: ONNX Runtime appends it anyway, for what is left over.
        source = str(model) if graph is None else graph.SerializeToString()
        if devices and engines is not None and target.session.contexts and not weights:
            make = partial(ort.InferenceSession, sess_options=session_options, enable_fallback=0)
            return load_with_context(ort, model, engines.engines, session_options, make)
        if devices:
            return ort.InferenceSession(source, session_options, enable_fallback=0)
        with small_workspaces() if target.session.needs_cuda else nullcontext():
            return ort.InferenceSession(source, session_options, providers=list(providers.items()), enable_fallback=0)

    try:
        try:
            session = load()
        except onnxruntime_errors(ort) as error:
            if _NOT_CAPTURED not in str(error):
                raise
            warnings.warn(f"{model} runs without a CUDA graph: {error}", SlowerWarning, stacklevel=2)
            del providers[CUDA_PROVIDER]["enable_cuda_graph"]
            session = load()
    except onnxruntime_errors(ort) as error:
        if provider != CUDA_PROVIDER and has_float8(read):
            raise TargetUnavailableError(
                f"{provider} has no products of float8: they take an NVIDIA GPU of compute capability 8.9 or newer",
                where=str(model),
                remedy=NEEDS,
            ) from error
        if (lacking := adapter_failure(error, target)) is not None:
            raise lacking from error
        raise cannot_run(provider, error, where=str(model), target=target.name, built_for=options.built_for) from error
    if session.get_providers()[0] != provider:
        raise TargetUnavailableError(
            f"{provider} could not be loaded; the session came up on {session.get_providers()[0]}",
            where=target.name,
            remedy="Its libraries or its device are missing: see `sdflow targets`.",
        )
    if target.session.needs_cuda:
        _require_cudnn(target)
    if engines is not None and remote is not None and not had:
        push_folder(engines.engines, remote)
    session.weights, session.live = weights, live  # they must outlive it
    session.loaded_on, session.built_for = target.name, options.built_for
    return session


def _session_options(ort: Any, target: Target, options: LoadOptions) -> Any:
    """ONNX Runtime's own options, as far as they are the same for every model."""
    made = ort.SessionOptions()
    made.log_severity_level = 4  # errors are raised; what matters of the warnings is checked afterwards
    made.enable_mem_pattern = target.session.memory_pattern
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, value in target.session.entries.items():
        made.add_session_config_entry(name, value)
    if options.profile is not None:
        made.enable_profiling, made.profile_file_prefix = True, str(options.profile)
    return made


def _with_own_kernels(graph: onnx.ModelProto, session_options: Any) -> onnx.ModelProto:
    """The graph with our kernels for what they can do, those that are right on this GPU."""
    without: frozenset[str] = frozenset()
    while (replaced := with_own_kernels(graph, hopper=on_hopper(), without=without)) is not None:
        ready = kernel_library(parts_in(replaced.graph.node))
        if ready is None:
            break
        if ready.wrong.keys() <= without:
            if all(node.domain != DOMAIN for node in graph.graph.node):  # else float8 has registered it
                session_options.register_custom_ops_library(str(ready.library))
            return replaced
        without |= ready.wrong.keys()
    return graph


def read_graph(model: Path) -> onnx.ModelProto:
    """The model without its external data. Raises VerificationError when there is none, or not all of its data, when it
    would take too much to read, and where ONNX Runtime would crash on it."""
    from sdflow.onnx_model.files import decode_errors, missing_data

    try:
        read = load_graph(model)
        lacking = missing_data(read, model.parent) if read.graph.node else "is no ONNX model"
        lacking = lacking or _crashing(read.graph)
    except FileNotFoundError:
        lacking = "there is no such file"
    except OSError as error:
        lacking = f"cannot be read: {error.strerror or error}"
    except decode_errors():
        lacking = "is no ONNX model"
    if lacking:
        raise VerificationError(lacking, where=str(model), remedy=DAMAGED)
    return read


def _crashing(graph: onnx.GraphProto) -> str | None:
    """What in a graph ends the process in place of an error. ONNX 17 allows it; seen with ONNX Runtime 1.31.1."""
    for node in graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 3 and not node.input[2]:
            return f"ONNX Runtime crashes on {node.name[:MOST_SAID]}: the name of its bias is empty, where it may be left out"
    return None


def has_planar_bias(graph: onnx.ModelProto) -> bool:
    """Whether a convolution of channels-first values has a bias.

    With `fuse_conv_bias`, ONNX Runtime 1.31.1 asks cuDNN (9.19) for a convolution and a bias in one kernel whose result has its
    channels first, and for float16 on an H200 there is none: HEURISTIC_QUERY_FAILED at the first run. NhwcConv has one.
    """
    return any(
        node.op_type == "Conv" and node.domain in ("", "ai.onnx") and len(node.input) > 2 and node.input[2]
        for node in graph.graph.node
    )


def provider_options(target: Target, provider: str, engines: EngineFolders | None) -> dict[str, str]:
    """The options of one of the target's providers, with the engines' folders filled in or left out, and with them the
    switches of what would be kept there."""
    options = target.session.options.get(provider, {})
    if engines is not None:
        return engines.filled(options)
    kept = {name.removesuffix("_path") for name, value in options.items() if CACHE_DIR in value or TIMING_DIR in value}
    left_out = {f"{name}{ending}" for name in kept for ending in ("", "_path", "_enable")}
    return {name: value for name, value in options.items() if name not in left_out}


def _load_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from torch's or NVIDIA's wheels: the provider's library then finds them in the process."""
    import torch  # noqa: F401

    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _load_tensorrt() -> None:
    """Load TensorRT from its Python package, if that is how it is installed: the provider's library then finds it in the
    process. Otherwise it is looked for as any library of the system."""
    with suppress(ImportError, OSError):
        import tensorrt  # noqa: F401


def _require_cudnn(target: Target) -> None:
    library = "cudnn64_9.dll" if sys.platform == "win32" else "libcudnn.so.9"
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise TargetUnavailableError(
            f"cuDNN 9 cannot be loaded: {error}",
            where=target.name,
            remedy="Install a CUDA build of torch (its wheels bring cuDNN) or the nvidia-cudnn package of its CUDA.",
        ) from error
