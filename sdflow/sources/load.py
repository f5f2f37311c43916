"""Build the PyTorch module of a submodel, or the whole pipeline, from `open_checkpoint`'s result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.file_stamp import check_stamps
from sdflow.disk.input_file import foreign_content, is_there, read_json
from sdflow.errors import CheckpointError, os_errors_as
from sdflow.families import part_of
from sdflow.families.shared.part import Companion, Part
from sdflow.models.base import Config, Model
from sdflow.sources.checkpoint import Checkpoint, files_of, listing
from sdflow.sources.companions import require_small
from sdflow.sources.fitting import apart, fit, require_size
from sdflow.sources.formats import WeightsFile, open_weights
from sdflow.sources.pickle_scan import MOST_UNFOLDED, require_small_pickle
from sdflow.sources.synthetic import tensors_for

if TYPE_CHECKING:
    import torch

# Exceptions that libraries raise for an invalid configuration or file.
_REJECTIONS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError, OSError)


MOST_SAID = 400
"""Maximum characters of a library's error message."""


def submodel_config(load: Mapping[str, Any]) -> dict[str, Any]:
    """The submodel's config.json (diffusers' or transformers'); for half of a VAE, the whole VAE's."""
    return dict(load["config"])


Load = Mapping[str, Any]
Tensors = Mapping[str, "torch.Tensor"]


def loaded(part: Part, load: Load, expected: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Load the parameters of these names and shapes, in float32. Raises CheckpointError."""
    import torch

    if load["kind"] == "synthetic":
        arrays = tensors_for(part.model, expected, load["seed"])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    check_stamps(load["files"])
    tensors = _fitted(part, load, expected, load["files"][0]["path"])
    check_stamps(load["files"])
    return tensors


def load_module(
    submodel: str, load: Load, read: Callable[[Part, Load, Mapping[str, tuple[int, ...]]], Tensors] = loaded
) -> torch.nn.Module:
    """The submodel's module in float32 and eval mode on the CPU, without gradients; for half of a VAE, the whole VAE.

    read: loads the parameters of a part, or of an adapter.
    Raises CheckpointError naming tensors that are missing, unexpected or of a wrong shape.
    """
    part = part_of(load, submodel)
    where = load["files"][0]["path"] if "files" in load else f"{load['kind']} {part.component}"
    module = _empty_module(part.model, submodel_config(load), where)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    if load["kind"] == "hollow":
        tensors = _hollow_tensors(module)
    else:
        for each, how, shapes in apart(part, load, expected):
            tensors |= read(each, how, shapes)
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def parameter_shapes(submodel: str, load: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """state_dict key -> shape of the submodel's module (of the whole VAE for its halves)."""
    module = _empty_module(part_of(load, submodel).model, submodel_config(load), f"config of {submodel}")
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _hollow_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A tensor of the right shape for every parameter, in the memory of one number, with strides of 0.

    Values differ between tensors, so that no two are taken for one. The load {"kind": "hollow", "config": ...} serves
    to trace the architecture without a checkpoint.
    """
    import torch

    expected = module.state_dict()
    if odd := [name for name, tensor in expected.items() if not tensor.is_floating_point()]:
        raise CheckpointError(f"its tensors {listing(odd)} are not of a floating-point type", where="hollow")
    return {
        name: torch.full((1,) * tensor.dim(), (index + 1) / (100 * len(expected))).expand(tensor.shape)
        for index, (name, tensor) in enumerate(expected.items())
    }


def load_pipeline(checkpoint: Checkpoint) -> Any:
    """diffusers' pipeline in float32 on the CPU from the same parts: the reference for verifying ONNX pipelines."""
    family = checkpoint.family
    modules = {
        component: load_module(parts[-1].name, checkpoint.submodels[parts[-1].name].load)
        for component, parts in family.components.items()
        if parts[-1].name in checkpoint.submodels
    }
    modules |= {
        name: load_module(name, checkpoint.submodels[name].load) for name in family.optional_parts(checkpoint.submodels)
    }
    companions = {
        name: load_companion(family.companions[name], folder, checkpoint.reference)
        for name, folder in checkpoint.companions.items()
    }
    return family.torch_pipeline(modules, companions, checkpoint.options)


def load_companion(companion: Companion, folder: Path, where: str) -> Any:
    """Load a tokenizer, scheduler or feature extractor from its folder, never from the hub.

    Raises CheckpointError if it is missing, damaged, too large, or of a class that the installed library lacks.
    """
    from sdflow.sources.companion_entries import wrong_entry

    if folder.is_dir():  # otherwise the library reports what is missing
        require_small(folder)
    what = f"its {folder.name} cannot be loaded"
    with rejections(where, what):
        config = dict(read_json(folder / companion.file, finite=False)) if is_there(folder / companion.file) else {}
        if wrong := wrong_entry(config):
            raise CheckpointError(f"{what}: {wrong}", where=where)
        return companion.load(folder, config)


@contextmanager
def rejections(where: str, what: str) -> Iterator[None]:
    """Raise a library's errors about invalid configurations or files as CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError  # of transformers' configurations

    try:
        yield
    except Exception as error:
        if not isinstance(error, (StrictDataclassError, *_REJECTIONS)) and type(error) is not Exception:
            raise
        # (tokenizers raises a bare Exception)
        raise CheckpointError(f"{what}: {_brief(error)}", where=where) from error


def _brief(error: Exception) -> str:
    """A library's message, shortened: torch lists every signature that it would have accepted."""
    text = str(error).strip()
    return text if len(text) <= MOST_SAID else text[:MOST_SAID].rpartition(" ")[0] + " ..."


def _empty_module(model: Model, config: Config, where: str) -> torch.nn.Module:
    """The module with parameters on the meta device: no memory, no random initialisation."""
    from accelerate import init_empty_weights

    require_size(config, where)
    with (
        rejections(where, f"its configuration is invalid for {model.class_name}"),
        init_empty_weights(include_buffers=False),
    ):
        return model.empty(config)


def _fitted(
    part: Part, load: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, torch.Tensor]:
    """Return the files' tensors by the module's names, in float32."""
    import torch

    prefix = load.get("prefix")
    tensors = _read_files(files_of(load), load["pickled"], prefix or "")
    stored = [(f"{prefix or ''}{name}", tuple(tensor.shape)) for name, tensor in tensors.items()]
    values = list(tensors.values())
    fitted = {
        key: found.values(values[found.index], expected[key]).to(torch.float32).contiguous()
        for key, found in fit(part, stored, expected, prefix, where).items()
    }
    for key, tensor in fitted.items():
        if not (tensor.sum().isfinite() or tensor.isfinite().all()):  # the sum is a fast first check; it may overflow
            raise CheckpointError(
                f"values of {key} are NaN or infinite",
                where=where,
                remedy="The file is damaged, or was written by a training that failed: use another one.",
            )
    return fitted


def _read_files(files: list[tuple[Path, str]], pickled: bool, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors with the prefix, under their names without it. files: from `files_of`."""
    tensors: dict[str, torch.Tensor] = {}
    for file, begin in files:
        held = _read_pickle(file, prefix) if pickled else _read_weights(file, prefix)
        part = {f"{begin}{name}": tensor for name, tensor in held.items()}
        twice = sorted(set(part) & set(tensors))
        if twice:
            raise CheckpointError(f"holds tensors that are also in another shard: {listing(twice)}", where=str(file))
        tensors |= part
    return tensors


def _read_weights(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    opened = open_weights(file)
    opened.require_read()
    if opened.format is not None:
        return _dequantized(opened, prefix)
    try:
        with safe_open(file, "pt") as stream:
            names = [name for name in stream.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            return {name.removeprefix(prefix): stream.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a valid safetensors file: {error}", where=str(file), remedy="Download or write the file again."
        ) from error


def _dequantized(opened: WeightsFile, prefix: str) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch

    return {
        name.removeprefix(prefix): torch.from_numpy(np.array(tensor.values()))
        if tensor.weights
        else torch.zeros(tensor.shape)  # a counter, which no parameter uses
        for name, tensor in opened.tensors.items()
        if name.startswith(prefix)
    }


def _read_pickle(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    tensors = load_pickle(file, "cpu")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_pickle(file: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, read with weights_only=True, which builds only tensors and plain data.

    device: "cpu", or "meta" for only names and shapes. Values are read on use, except from the oldest format (torch
    before 1.6), which is read whole. Raises CheckpointError for anything else.
    """
    return _weights(file, unpickled(file, device))


def pickled_shapes(file: Path) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """The shapes of a pickle's tensors, and the number of training steps, if the file has it.

    Raises CheckpointError as `load_pickle` does.
    """
    value = unpickled(file, "meta")
    step = value.get("global_step") if isinstance(value, dict) and "state_dict" in value else None
    shapes = {name: tuple(tensor.shape) for name, tensor in _weights(file, value).items()}
    return shapes, step if isinstance(step, int) else None


def unpickled(file: Path, device: str) -> Any:
    import pickle
    import struct
    import zipfile

    import torch

    with os_errors_as("cannot be read", file, kind=CheckpointError):
        foreign = foreign_content(file)
    if foreign:
        raise CheckpointError(f"not a pickle of only weights: {foreign}", where=str(file))
    try:
        zipped = zipfile.is_zipfile(file)
        if zipped:
            _require_stored(file)
        require_small_pickle(file)
        return torch.load(file, map_location=device, weights_only=True, mmap=zipped and device == "cpu")
    except (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, MemoryError, struct.error, *_REJECTIONS) as error:
        raise CheckpointError(
            f"not a pickle of only weights: {_refusal(error)}",
            where=str(file),
            remedy="It may be damaged, or run code when loaded. Use a .safetensors file of these weights.",
        ) from error


def _require_stored(file: Path) -> None:
    """Reject an archive that unpacks to more than its own size: torch stores parts uncompressed."""
    import zipfile

    with zipfile.ZipFile(file) as archive:
        unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > file.stat().st_size:
        raise CheckpointError(
            f"not a pickle of only weights: {file.stat().st_size} bytes that unpack to {unpacked}",
            where=str(file),
            remedy="torch does not compress. Use a .safetensors file of these weights.",
        )


def _refusal(error: Exception) -> str:
    """torch's finding, without its advice to load the file with its code."""
    found = re.search(r"WeightsUnpickler error: ([^\n]{1,200})", str(error))
    if found is not None:
        return found[1]
    return f"{type(error).__name__}" if "weights_only" in str(error) or not str(error) else str(error).splitlines()[0]


def _weights(file: Path, value: Any) -> dict[str, torch.Tensor]:
    import torch

    value = value.get("state_dict", value) if isinstance(value, dict) else value
    if isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
        # The form of pickled IP-Adapters: the tensors of each part by name.
        value = {f"{part}.{name}": tensor for part, tensors in value.items() for name, tensor in tensors.items()}
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    ):
        raise CheckpointError("not a pickle of tensors by name", where=str(file), remedy="Use a .safetensors file.")
    for name, tensor in value.items():
        if (
            tensor.numel() > MOST_UNFOLDED
            and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            raise CheckpointError(
                f"{name[:200]} is {tuple(tensor.shape)}, but holds only {tensor.untyped_storage().nbytes()} bytes",
                where=str(file),
                remedy="Use a .safetensors file of these weights.",
            )
    return value
