"""Engines that TensorRT's Python package builds of a pipeline's graphs: what ONNX Runtime is compared with in `sdflow bench`.

An engine is built without its weights, for any (`REFIT`, `STRIP_PLAN`), once for a structure and its shapes; the weights are put
in from the graph's files, seconds for another LoRA. Written against the documented interface of TensorRT 10
(https://docs.nvidia.com/deeplearning/tensorrt/api/python_api), and not run: there was no TensorRT. Its release notes tell of
biases that `REFIT` may lose; `sdflow bench` compares every image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE
from sdflow.disk.atomic_write import write_whole
from sdflow.errors import UsageError, VerificationError
from sdflow.families.shared.part import Part
from sdflow.runtime.files.folder import (
    folder_defaults,
    folder_family,
    load_companions,
    onnx_submodels,
    read_options,
    refiner_of,
    submodel_config,
)
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.engine_cache import TENSORRT, EngineFolders, Profile, engine_folders
from sdflow.runtime.sessions.place import Place, place
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.targets import TARGETS

if TYPE_CHECKING:
    import torch

FEW = 16
"""Numbers of fewer elements are a part of the structure: scales, limits, shapes."""


def tensorrt_pipeline(folder: Path) -> Pipeline:
    """The pipeline of a folder, its submodels on engines of TensorRT. Raises UsageError for one with a refiner."""
    if refiner_of(folder) is not None:
        raise UsageError(
            "its refiner has no engine of TensorRT's own", where=str(folder), remedy="Compare the base alone."
        )
    family, where = folder_family(folder), place("cuda")
    submodels = {}
    for name in onnx_submodels(folder):
        if name != family.checker:
            config = submodel_config(folder, name)
            submodels[name] = EngineSubmodel(folder / name / MODEL_FILE, family.part(name).of(config), config, where)
    companions, options = load_companions(folder), read_options(folder)
    return Pipeline(family, submodels, companions, options, defaults=folder_defaults(folder), split=False)


class EngineSubmodel(Submodel):
    """One graph on engines of its own, one for each set of shapes."""

    def __init__(self, model: Path, part: Part, config: Mapping[str, Any], where: Place) -> None:
        super().__init__(_no_session, part, config, where)
        self._model = model.resolve()

    def bound(self, **shapes: tuple[int, ...]) -> Any:
        key = tuple(sorted(shapes.items()))
        if key not in self._bound:
            engine = engine_of(self._model, Profile.of(shapes))
            self._bound[key] = EngineBound(engine, self.place, shapes)  # type: ignore[assignment]
        return self._bound[key]


def _no_session(*given: Any, **more: Any) -> Any:
    raise AssertionError("an engine is no session of ONNX Runtime")


class EngineBound:
    """The tensors of an engine for one set of shapes. Fill `inputs` in place, then `run`."""

    def __init__(self, engine: Any, where: Place, shapes: Mapping[str, tuple[int, ...]]) -> None:
        import tensorrt
        import torch

        self._engine, self._place = engine, where
        self._context = engine.create_execution_context()
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        given = [name for name in names if engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT]
        if set(given) != set(shapes):
            raise VerificationError(f"the engine takes {', '.join(given)}, not {', '.join(shapes)}")
        with where.current():
            for name in [*given, *(each for each in names if each not in given)]:
                if name in shapes:
                    self._context.set_input_shape(name, shapes[name])
                dtype = getattr(torch, tensorrt.nptype(engine.get_tensor_dtype(name)).__name__)
                size = tuple(self._context.get_tensor_shape(name))
                tensor = torch.zeros(size, dtype=dtype, device=where.device)
                (self.inputs if name in shapes else self.outputs)[name] = tensor
                self._context.set_tensor_address(name, tensor.data_ptr())

    def run(self) -> dict[str, torch.Tensor]:
        """Queue the computation; the tensors are the same every time."""
        stream = 0 if self._place.stream is None else self._place.stream.cuda_stream
        if not self._context.execute_async_v3(stream):
            raise VerificationError("TensorRT cannot run this engine")
        return self.outputs


def engine_of(model: Path, profile: Profile) -> Any:
    """An engine with the graph's weights: of a stripped one that is there, or built now.

    Raises VerificationError where TensorRT takes the graph or its weights not.
    """
    import tensorrt

    folders = engine_folders(None, TARGETS["tensorrt"], TENSORRT, f"stripped {structure_digest(model)}", profile)
    path = folders.engines / "stripped.engine"
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    if not path.exists():
        write_whole(path, _built(tensorrt, logger, model, profile, folders))
    engine = tensorrt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise VerificationError("TensorRT cannot read this engine", where=str(path), remedy="Delete the file.")
    refitter = tensorrt.Refitter(engine, logger)
    parser = tensorrt.OnnxParserRefitter(refitter, logger)
    with _with_parser_errors(parser, model):
        taken = parser.refit_from_file(str(model)) and refitter.refit_cuda_engine()
        if not taken:
            lacking = ", ".join(refitter.get_missing_weights()[:5])
            raise VerificationError(
                "its weights do not go into the engine" + (f"; missing: {lacking}" if lacking else "")
            )
    return engine


def _built(tensorrt: Any, logger: Any, model: Path, profile: Profile, folders: EngineFolders) -> bytes:
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    config = builder.create_builder_config()
    with _with_parser_errors(parser, model):
        if not parser.parse_from_file(str(model)):
            raise VerificationError("TensorRT's parser does not take this graph")
    for flag in ("REFIT", "STRIP_PLAN"):
        config.set_flag(getattr(tensorrt.BuilderFlag, flag))
    shapes = builder.create_optimization_profile()
    for name in profile.usual:
        shapes.set_shape(name, profile.smallest[name], profile.usual[name], profile.largest[name])
    config.add_optimization_profile(shapes)
    timing = folders.timing / "python.timing"
    measured = config.create_timing_cache(timing.read_bytes() if timing.exists() else b"")
    config.set_timing_cache(measured, False)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise VerificationError("TensorRT builds no engine of this graph", where=str(model))
    write_whole(timing, bytes(config.get_timing_cache().serialize()))
    return bytes(engine)


@contextmanager
def _with_parser_errors(parser: Any, model: Path) -> Iterator[None]:
    """What a parser says goes into the error."""
    try:
        yield
    except VerificationError as error:
        said = "; ".join(parser.get_error(index).desc() for index in range(min(parser.num_errors, 3)))
        raise VerificationError(error.what + (f": {said}" if said else ""), where=str(model)) from error


def structure_digest(model: Path) -> str:
    """Of a graph without the values of its weights: equal for all checkpoints and LoRAs of an architecture."""
    from onnx import TensorProto

    read = read_graph(model)
    for tensor in read.graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16) and prod(tensor.dims) >= FEW:
            for field in ("raw_data", "float_data", "int32_data", "external_data"):
                tensor.ClearField(field)
    return hashlib.sha256(read.SerializeToString(deterministic=True)).hexdigest()
