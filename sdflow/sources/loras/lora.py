"""Reads LoRA files and computes what they add to a weight, in float32 and without torch.

W' = W + scale * (alpha / rank) * up @ down   (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.digest import digest_json
from sdflow.disk.input_file import is_regular, is_there, no_file
from sdflow.errors import CheckpointError
from sdflow.families import DEFAULT, FAMILIES, any_family
from sdflow.sources.checkpoint import Checkpoint, FileDigests, listing
from sdflow.sources.hub import choose_file, hub_file
from sdflow.sources.loras.lora_header import made_for, misfit, read_lora_header
from sdflow.sources.loras.lora_names import Places, Role, peft_module, rows_of, spellings
from sdflow.sources.loras.peft_metadata import BESIDE, METADATA_KEY
from sdflow.sources.reference import PICKLE_SUFFIXES, HubReference, LocalReference, parse_reference
from sdflow.sources.safetensors_file import read_float_tensors, read_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LoraLayer:
    """What a LoRA holds for one weight.

    up: (out, rank). down: (rank, in * kernel height * kernel width). scale: alpha / rank.
    """

    up: Floats
    down: Floats
    scale: float


def find_lora(reference: str, weight_name: str | None = None, *, download: bool) -> Path:
    """The .safetensors file of a LoRA: a file, a folder that holds it, or hf:owner/name[@revision].

    weight_name: which file of a folder or repository; not needed when there is only one.
    Raises CheckpointNotLocal as `open_checkpoint` does, CheckpointError for what is missing, ambiguous or pickled.
    """
    parsed = parse_reference(reference)
    if isinstance(parsed, HubReference):
        _refuse_pickle(weight_name or "", reference)
        return hub_file(parsed, weight_name, download=download)
    if not isinstance(parsed, LocalReference) or parsed.architecture is not None:
        raise CheckpointError("not a LoRA", where=reference, remedy="Write a file, a folder or hf:owner/name.")
    path = parsed.path
    if is_there(path) and path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.rglob("*.*") if file.is_file()]
        path = path / choose_file(names, weight_name, str(path))
    elif weight_name is not None:
        raise CheckpointError(
            f"is no folder that could hold {weight_name}", where=str(path), remedy="Name the file alone, or its folder."
        )
    elif not is_regular(path):
        raise CheckpointError(no_file(path), where=str(path), remedy="Check the path of the LoRA.")
    _refuse_pickle(path.name, str(path))
    return path


def _refuse_pickle(name: str, where: str) -> None:
    if name.lower().endswith(PICKLE_SUFFIXES):
        raise CheckpointError(
            "pickled LoRAs are not read: a pickle can run any code when it is loaded",
            where=where,
            remedy="Convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), 'x.safetensors').",
        )


def lora_submodels(path: Path) -> tuple[str, ...]:
    """The submodels that a LoRA file changes, from its header and its configuration alone.

    Raises CheckpointError for a file that is no LoRA, or of a kind that is not supported.
    """
    submodels = {parsed.submodel for parsed in read_lora_header(path).names.values()}
    return tuple(name for name in any_family.submodels_with_loras() if name in submodels)


def lora_digest(path: Path, digests: FileDigests) -> str:
    """What identifies the content of a LoRA: of its file, and of PEFT's configuration where that lies beside it."""
    whole = digests.digest(path)
    if not read_lora_header(path).beside:
        return whole
    return digest_json({"file": whole, "config": digests.digest(path.with_name(BESIDE))})


def lora_files(path: Path) -> list[Path]:
    """The files that `lora_digest` is of."""
    return [path, *([path.with_name(BESIDE)] if read_lora_header(path).beside else [])]


def require_made_for(path: Path, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a LoRA that its header says was made for another kind of model than this checkpoint.

    What the header leaves open, `read_lora` finds: it sees every shape.
    """
    found = read_lora_header(path)
    names, header = found.names, found.entries
    configs = {name: source.load["config"] for name, source in checkpoint.submodels.items()}
    why = misfit(checkpoint.family, configs, names, header)
    if why is None:
        return
    own = checkpoint.family.title_of(configs)
    others = made_for(names, header)
    kind = f"a LoRA for {' or '.join(others)}" if others and own not in others else "no LoRA for this model"
    raise CheckpointError(
        f"is {kind}, and {checkpoint.reference} is {own} ({why})",
        where=str(path),
        remedy=f"Use a LoRA made for {own}.",
    )


def read_lora(
    path: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], family: str = DEFAULT
) -> dict[str, dict[str, LoraLayer]]:
    """The layers of a LoRA file: submodel -> state_dict key -> layer.

    shapes: for each submodel that is asked for, the shapes of its whole state_dict. Tensors for a submodel that is not
        among them are left to whoever reads the file for that one. family: of the model.
    Raises CheckpointError for tensors that have no place, lack their partner, or are of a wrong shape, naming the first
    and what the LoRA was made for; and for DoRA, LoHa, LoKr and other adapters that are no plain LoRA.
    """
    header = read_lora_header(path)
    names, configs = header.names, header.configs
    models = {name: FAMILIES[family].part(name).model for name in shapes}
    tables = {name: spellings(models[name], keys) for name, keys in shapes.items()}
    groups: dict[tuple[str, Places], dict[Role, str]] = {}
    problems: list[str] = []
    for name, parsed in names.items():
        if parsed.submodel not in FAMILIES[family].with_loras:
            problems.append(f"{name}: there is no {parsed.submodel}")
        if parsed.submodel not in tables:
            continue
        places = tables[parsed.submodel].get(parsed.module)
        if places is None:
            problems.append(f"{name}: the {parsed.submodel} has no such module")
        elif (other := groups.setdefault((parsed.submodel, places), {}).setdefault(parsed.role, name)) != name:
            problems.append(f"{name}: {other} is for the same weight")
    factors = [name for group in groups.values() for role, name in group.items() if role != "alpha"]
    tensors = read_float_tensors(path, factors)
    alphas = read_numbers(
        path,
        [
            group["alpha"]
            for group in groups.values()
            if "alpha" in group and prod(header.entries[group["alpha"]].shape) == 1
        ],
    )
    for submodel, said in configs.items():
        known = [(places, group) for (of, places), group in groups.items() if of == submodel and "down" in group]
        said.require_quick(
            [peft_module(models[submodel], places, names[group["down"]]) for places, group in known], str(path)
        )
    ranks: list[str] = []
    layers: dict[str, dict[str, LoraLayer]] = {submodel: {} for submodel in shapes}
    for (submodel, places), group in groups.items():
        found: dict[Role, Floats] = {role: tensors[name] for role, name in group.items() if role != "alpha"}
        alpha = alphas.get(group.get("alpha", ""))
        columns = shapes[submodel][places[0].name][1:]
        rows = sum(shapes[submodel][place.name][0] for place in places)
        problem = _problem(group, found, alpha, (rows, *columns))
        problem = problem or _twice(group, [place.name for place in places if place.name in layers[submodel]])
        if problem:
            problems.append(problem)
            continue
        rank = found["down"].shape[0]
        config = configs.get(submodel)
        module = peft_module(models[submodel], places, names[group["down"]])
        if config is not None and config.rank(module) != rank:
            ranks.append(f"{group['down']}: {rank}, not {config.rank(module)}")
        # Without either, alpha is the rank.
        default = 1.0 if config is None else config.scale(module, rank)
        scale = default if alpha is None else alpha / rank
        up, down = found["up"].reshape(-1, rank), found["down"].reshape(rank, -1)
        for place in places:
            layers[submodel][place.name] = LoraLayer(rows_of(up, place), down, scale)
    if problems:
        others = " or ".join(made_for(names, header.entries))
        raise CheckpointError(
            f"{len(problems)} of its parts do not fit the model: {listing(problems)}",
            where=str(path),
            remedy=f"Use a LoRA made for this architecture ({FAMILIES[family].title})."
            + (f" This one was made for {others}." if others else ""),
        )
    if ranks:  # diffusers does not load such a file either, and its alphas may be just as wrong
        raise CheckpointError(
            f"{len(ranks)} of its tensors have another rank than its {METADATA_KEY} says: {listing(ranks)}",
            where=str(path),
            remedy="Correct r and rank_pattern there, whose first pattern that fits a module counts.",
        )
    return layers


def lora_delta(layer: LoraLayer, shape: tuple[int, ...], scale: float) -> Floats:
    """What the LoRA adds to a weight of this shape at this scale, float32."""
    import numpy as np

    return _product(layer.up, layer.down, np.float32(scale * layer.scale)).reshape(shape)


MOST_WITH_LOW_PARTS = 0.5
"""Of the rows and the columns; with more, one product of everything costs less."""


_BLOCK = 1 << 16
"""Values of a product that are computed at a time: they stay in the processor's cache."""


def _product(up: Floats, down: Floats, scale: np.float32) -> Floats:
    """up @ down, times the scale, the same bits on every machine: float32 sums depend on the order in which a processor adds.

    Each factor is cut into two whole numbers, so short that the products and their sums are exact in float64, in any
    order (Ozaki et al. 2012, https://doi.org/10.1007/s11075-011-9478-1). What is left out is 2**-44 of the largest.
    """
    import numpy as np

    bits = (53 - (up.shape[1] - 1).bit_length()) // 2
    (high_up, low_up, unit_up), (high_down, low_down, unit_down) = _cut(up, bits), _cut(down, bits)
    # Factors by powers of two are exact wherever they stand: here they cost least.
    high_up *= unit_up * unit_down
    low_up *= unit_up * unit_down * 2.0**-bits
    left, right = np.hstack([high_up * 2.0**-bits, low_up]), np.vstack([low_down, high_down])
    # float16's few bits are all in the high parts, but for the smallest values: few rows and columns have low ones.
    rows, columns = np.flatnonzero(low_up.any(axis=1)), np.flatnonzero(low_down.any(axis=0))
    all_low = len(rows) / max(1, len(low_up)) + len(columns) / max(1, low_down.shape[1]) > MOST_WITH_LOW_PARTS
    right_columns = right[:, columns]
    product = np.empty((up.shape[0], down.shape[1]), np.float32)
    step = max(1, _BLOCK // max(1, product.shape[1]))
    total = np.empty((min(step, len(product)), product.shape[1]))
    for begin in range(0, len(product), step):
        block = slice(begin, begin + step)
        sums = np.matmul(high_up[block], high_down, out=total[: len(product) - begin])
        if all_low:
            sums += left[block] @ right
        else:
            low = rows[slice(*np.searchsorted(rows, (begin, begin + step)))]
            whole_rows = sums[low - begin] + left[low] @ right if low.size else None
            if columns.size:
                sums[:, columns] += left[block] @ right_columns
            if whole_rows is not None:
                sums[low - begin] = whole_rows
        product[block] = sums
        product[block] *= scale
    return product


def _cut(factor: Floats, bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """(high, low, unit): whole numbers of at most `bits` bits with factor = unit * (high + low / 2**bits), nearly."""
    import numpy as np

    unit = 2.0 ** (int(np.frexp(np.abs(factor).max(initial=0))[1]) - bits)
    scaled = factor.astype(np.float64) / unit
    high = np.rint(scaled)
    return high, np.rint((scaled - high) * 2.0**bits), unit


def _twice(group: Mapping[Role, str], keys: Sequence[str]) -> str | None:
    """What is wrong with the tensors of a module whose rows, these, another module of the file changes too."""
    return f"{group['up']}: there are others for {' and '.join(keys)}" if keys else None


def _problem(
    group: Mapping[Role, str], found: Mapping[Role, Floats], alpha: float | None, shape: tuple[int, ...]
) -> str | None:
    """What is wrong with the tensors for a weight of this shape, naming one of them."""
    import numpy as np

    if "up" not in group or "down" not in group:
        lacking = " and ".join(role for role in ("up", "down") if role not in group)
        return f"{', '.join(group.values())}: without its {lacking} tensor"
    for role, tensor in found.items():
        if not np.isfinite(tensor).all():
            return f"{group[role]}: not all of its values are finite"
    if "alpha" in group and (alpha is None or not np.isfinite(alpha)):
        return f"{group['alpha']}: {'several values' if alpha is None else alpha}, where a number belongs"
    rank = found["down"].shape[0] if found["down"].ndim else 0
    kernel = shape[2:]
    one = (1,) * len(kernel)
    for role, wanted in (("down", (rank, shape[1], *kernel)), ("up", (shape[0], rank, *one))):
        tensor = found[role]
        # Linear layers and 1x1 convolutions are one thing: files of the one serve the other. DyLoRA's up is always linear.
        flat = all(side == 1 for side in wanted[2:])
        plain = tensor.shape[:2] if flat and all(side == 1 for side in tensor.shape[2:]) else tensor.shape
        if rank == 0 or plain != (wanted[:2] if flat else wanted):
            return f"{group[role]}: {list(tensor.shape)} where {list(wanted)} belongs"
    return None
