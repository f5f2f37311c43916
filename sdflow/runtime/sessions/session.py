"""ONNX Runtime sessions: a submodel runs on the target's execution provider or fails; there is no fallback."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Mapping
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
from sdflow.onnx_model.int8 import has_int8
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.kernels.float8 import NEEDS, float8_library, with_float8
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.int8 import int8_library, with_definition, with_int8
from sdflow.runtime.kernels.library import kernel_library
from sdflow.runtime.kernels.parts import parts_in
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.cannot_run import MOST_SAID, cannot_run
from sdflow.runtime.sessions.contexts import load_with_context
from sdflow.runtime.sessions.cublas import small_workspaces
from sdflow.runtime.sessions.cuda_argmax import with_float_argmax
from sdflow.runtime.sessions.dimensions import folded, free_dimensions, profile_of_graph
from sdflow.runtime.sessions.engine_cache import (
    TENSORRT,
    EngineFolders,
    Profile,
    Shapes,
    engine_folders,
    keeps_engines,
)
from sdflow.runtime.sessions.shape_nodes import runs_on_device
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.runtime.sessions.webgpu_angles import with_right_angles
from sdflow.runtime.sessions.webgpu_attention import with_right_attention
from sdflow.runtime.sessions.webgpu_norms import with_centered_norms
from sdflow.targets import CACHE_DIR, CUDA_PROVIDER, TIMING_DIR, WEBGPU_PROVIDER, Target

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    import torch

    from sdflow.runtime.sessions.streamed_weights import StreamedWeights

# ONNX Runtime's message if a node is not on the provider or the graph has control flow.
_NOT_CAPTURED = "cannot use the graph capture feature"

DAMAGED = "The folder is damaged: rebuild the pipeline with sdflow run."


@dataclass(frozen=True)
class LoadOptions:
    """Session settings shared by all submodels of a pipeline.

    engine_cache: folder for a provider's compiled files; None: the user's (`sdflow.runtime.sessions.engine_cache`).
    threads: CPU threads per operator; None: as in the tuning, else ONNX Runtime's default.
    tuning: choices on top of the target's settings.
    stream: address of the CUDA stream to use; None: the session's own. device: number of the GPU, which is the current
        one while a session is created (`Place.selected`).
    profile: prefix of a profile that `end_profiling` writes.
    built_for: the pipeline folder's target, for messages.
    """

    engine_cache: Path | None = None
    threads: int | None = None
    tuning: Tuning = UNTUNED
    stream: int | None = None
    device: int = 0
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
    streams: StreamedWeights | None = None,
    capture: bool = False,
    artifact: str | None = None,
    profile: Profile | None = None,
) -> onnxruntime.InferenceSession:
    """Load `model` on the target's provider.

    shapes: input shapes; required by targets with static shapes, and fixed there.
    graph: loaded instead; its large weights are next to `model`. On CUDA, `sdflow.runtime.kernels` replace what they
    can, which requires fixed shapes.
    weights: existing initializers, used instead of those in the model's data file.
    live: weights that are graph inputs (`sdflow.runtime.sessions.live_weights`), and their memory.
    streams: weights of `graph` that are copied to the device in every run.
    artifact: digest of the model and its weights; without it, or with `graph`, the provider stores no compiled files.
    profile: range of input shapes, for targets that need it.
    capture: allow CUDA graphs (run option `gpu_graph_id`) if the provider supports them and runs every node; the
    session's provider options tell. A graph that cannot be captured runs without, with a warning.
    Raises TargetUnavailableError if the provider is missing or cannot be loaded, and VerificationError if it cannot run
    this graph.
    """
    ort, provider = onnxruntime_for(target)
    if target.session.needs_cuda:
        _load_cuda(ort)
    if provider == TENSORRT:
        _load_tensorrt()
    session_options = _session_options(ort, target, options)
    # Check the file before ONNX Runtime reads it: a pipe, an oversized or a broken file would make it hang or crash.
    read = read_graph(model) if graph is None else graph
    if provider == CUDA_PROVIDER and has_float8(read):  # float8 requires sdflow's operators with any tuning
        session_options.register_custom_ops_library(str(float8_library(options.device)))
        read = graph = with_float8(read, hopper=on_hopper())
    if has_int8(read):
        library = int8_library(options.device, on_cuda=provider == CUDA_PROVIDER)
        if library is not None:
            session_options.register_custom_ops_library(str(library))
        read = graph = with_definition(read) if library is None else with_int8(read)
    if provider == CUDA_PROVIDER and with_float_argmax(read):
        graph = read
    devices = plugins_of(ort, target).devices.get(provider, [])
    if target.session.folded:
        read = graph = folded(read, shapes or {}, str(model))
    if provider == WEBGPU_PROVIDER:
        with_right_attention(read, ort, target, devices)
        with_right_angles(read)
        with_centered_norms(read)
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
    for each in providers.values():
        if target.session.needs_cuda and options.stream is not None:
            each["user_compute_stream"] = str(options.stream)
        if options.device:
            each["device_id"] = str(options.device)
    options.tuning.apply(session_options, providers[provider], ort)
    if options.threads is not None:
        session_options.intra_op_num_threads = options.threads
    if graph is not None and provider == CUDA_PROVIDER and options.tuning.own_kernels:
        graph = _with_own_kernels(graph, session_options, options.device)
    if streams is not None and graph is not None:
        if all(node.domain != DOMAIN for node in graph.graph.node):  # otherwise registered above
            session_options.register_custom_ops_library(str(streams.library))
        graph, streamed = streams.open(graph)
        live = {**live, **streamed}
        capture = capture and streams.captures
    if capture and options.tuning.cuda_graphs and provider == CUDA_PROVIDER:
        providers[CUDA_PROVIDER]["enable_cuda_graph"] = "1"

    if devices:
        session_options.add_provider_for_devices(devices[:1], providers[provider])

    shared = None if engines is None else _shared(engines)

    def load() -> Any:
        # The CPU provider is not listed for other targets: ONNX Runtime appends it anyway, for leftover nodes.
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
                f"{provider} does not support float8, which requires an NVIDIA GPU of compute capability 8.9 or newer",
                where=str(model),
                remedy=NEEDS,
            ) from error
        if (lacking := adapter_failure(error, target)) is not None:
            raise lacking from error
        raise cannot_run(provider, error, where=str(model), target=target.name, built_for=options.built_for) from error
    if session.get_providers()[0] != provider:
        raise TargetUnavailableError(
            f"{provider} could not be loaded; the session fell back to {session.get_providers()[0]}",
            where=target.name,
            remedy="Its libraries or device are missing; see `sdflow targets`.",
        )
    if target.session.needs_cuda:
        _require_cudnn(target)
    if shared is not None:
        shared()
    session.weights, session.live, session.streams = weights, live, streams  # must outlive the session
    session.loaded_on, session.built_for = target.name, options.built_for
    captured = "1" in (each.get("enable_cuda_graph") for each in providers.values())
    session.whole = captured or not target.session.needs_cuda or runs_on_device(session, read)
    return session


def _shared(engines: EngineFolders) -> Callable[[], object] | None:
    """Fetch engines from the remote cache, if there is one. Return what pushes new ones, if there were none."""
    from sdflow.runtime.sessions.engine_share import fetch_engines, has_engines, push_folder, remote_of_engines

    remote = remote_of_engines()
    if remote is None:
        return None
    fetch_engines(engines.engines, remote)
    return None if has_engines(engines.engines) else partial(push_folder, engines.engines, remote)


def _session_options(ort: Any, target: Target, options: LoadOptions) -> Any:
    """Return the ONNX Runtime options that are the same for every model."""
    made = ort.SessionOptions()
    made.log_severity_level = 4  # errors are raised; relevant warnings are checked afterwards
    made.enable_mem_pattern = target.session.memory_pattern
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, value in target.session.entries.items():
        made.add_session_config_entry(name, value)
    if options.profile is not None:
        made.enable_profiling, made.profile_file_prefix = True, str(options.profile)
    return made


def _with_own_kernels(graph: onnx.ModelProto, session_options: Any, device: int) -> onnx.ModelProto:
    """Return the graph with sdflow's kernels, as far as they pass their tests on this GPU."""
    without: frozenset[str] = frozenset()
    while (replaced := with_own_kernels(graph, hopper=on_hopper(), without=without)) is not None:
        ready = kernel_library(parts_in(replaced.graph.node), device)
        if ready is None:
            break
        if ready.wrong.keys() <= without:
            if all(node.domain != DOMAIN for node in graph.graph.node):  # otherwise registered for float8 or int8
                session_options.register_custom_ops_library(str(ready.library))
            return replaced
        without |= ready.wrong.keys()
    return graph


def read_graph(model: Path) -> onnx.ModelProto:
    """Return the model without its external data. Raises VerificationError if it or its data is missing, if it is too
    large to read, or if ONNX Runtime would crash on it."""
    from sdflow.onnx_model.files import decode_errors, missing_data

    try:
        read = load_graph(model)
        lacking = missing_data(read, model.parent) if read.graph.node else "is not an ONNX model"
        lacking = lacking or _crashing(read.graph)
    except FileNotFoundError:
        lacking = "there is no such file"
    except OSError as error:
        lacking = f"cannot be read: {error.strerror or error}"
    except decode_errors():
        lacking = "is not an ONNX model"
    if lacking:
        raise VerificationError(lacking, where=str(model), remedy=DAMAGED)
    return read


def _crashing(graph: onnx.GraphProto) -> str | None:
    """Return why a graph would crash ONNX Runtime (1.31.1) instead of raising an error. ONNX 17 allows such graphs."""
    for node in graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 3 and not node.input[2]:
            return (
                f"ONNX Runtime crashes on {node.name[:MOST_SAID]}: its bias has an empty name instead of being omitted"
            )
    return None


def has_planar_bias(graph: onnx.ModelProto) -> bool:
    """Whether a convolution of channels-first values has a bias.

    With `fuse_conv_bias`, ONNX Runtime 1.31.1 requests a fused convolution and bias with channels-first output from
    cuDNN (9.19), which has none for float16 on an H200: HEURISTIC_QUERY_FAILED at the first run. NhwcConv has one.
    """
    return any(
        node.op_type == "Conv" and node.domain in ("", "ai.onnx") and len(node.input) > 2 and node.input[2]
        for node in graph.graph.node
    )


def provider_options(target: Target, provider: str, engines: EngineFolders | None) -> dict[str, str]:
    """Return the options of one of the target's providers, with the engine folders filled in; without folders, the
    options that use them are omitted."""
    options = target.session.options.get(provider, {})
    if engines is not None:
        return engines.filled(options)
    kept = {name.removesuffix("_path") for name, value in options.items() if CACHE_DIR in value or TIMING_DIR in value}
    left_out = {f"{name}{ending}" for name in kept for ending in ("", "_path", "_enable")}
    return {name: value for name, value in options.items() if name not in left_out}


def _load_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from torch's or NVIDIA's wheels, so the provider's library finds them in the process."""
    import torch  # noqa: F401

    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _load_tensorrt() -> None:
    """Load TensorRT from its Python package, if installed, so the provider's library finds it in the process. Otherwise
    the system looks for it."""
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
            remedy="Install a CUDA build of torch, which includes cuDNN, or the matching nvidia-cudnn package.",
        ) from error
