"""Run a PyTorch module whose weights exceed memory: each part's are read before its forward, and freed after it.

Module and forward are the library's own; hooks insert the values. Elsewhere a weight keeps its shape and type but no
values (NaN throughout, in the memory of one number), so that using one out of turn shows in every result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sdflow.verify.reference.turns import Turns

if TYPE_CHECKING:
    import torch

READERS = 2
"""Threads that read and convert weights, one tensor each at a time."""
Read = Callable[[str], "torch.Tensor"]
"""Reads a parameter or buffer in float32, by its name in the state_dict."""
Merges = Mapping[str, Sequence[Any]]
"""Weight -> PEFT's layers to merge into it, in order."""
Forward = Callable[..., Any]
SideBySide = Callable[[Callable[[], None], Callable[[], None]], None]


class Reading:
    """Reads the weights of a part, and keeps the last one for other modules that need it next."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self._last: tuple[str, ...] = ()
        self._values: list[torch.Tensor] = []

    def part(self, names: Sequence[str], *, keep: bool) -> list[torch.Tensor]:
        """The values of these weights in float32, read-only. keep: until another part is read."""
        if tuple(names) == self._last:
            return self._values
        self.forget()
        with ThreadPoolExecutor(READERS) as pool:
            values = [*pool.map(self.read, names)]
        if keep:
            self._last, self._values = tuple(names), values
        return values

    def forget(self) -> None:
        """Drop the kept values."""
        self._last, self._values = (), []


class StreamedWeights:
    """Inserts a module's weights while they are needed."""

    def __init__(self, module: torch.nn.Module, read: Read, most: int, merges: Merges) -> None:
        """most: limit in bytes for weights in memory, as float32; exceeded only by a single module with more."""
        self._module, self.reading, self._merges = module, Reading(read), merges
        self._through: torch.dtype | None = None
        self._turns: Turns | None = None
        self.wide: dict[int, torch.Tensor] = {}
        self._inside: dict[tuple[str, ...], int] = {}
        names = module.state_dict().keys()
        own = {name for name in names if "." not in name}  # of the module itself, whose forward may be bypassed
        self._names = [name for name in names if name not in own]
        for name in own:
            self._put(name, read(name))
        self._hollow()
        for part, names in _parts(module, most):
            part.register_forward_pre_hook(self._load(tuple(names)))
            part.register_forward_hook(self._unload(tuple(names)), always_call=True)

    def take_turns(self, turns: Turns, reading: Reading) -> None:
        """Let runs of `turns` share this module, and `reading` with other modules of the same weights: a part stays
        until all runs have passed it, with float32 copies of its halves (`wide`, by address)."""
        self._turns, self.reading = turns, reading

    def alone(self) -> None:
        """Undo `take_turns`."""
        self._turns = None
        self.reading.forget()
        self._leave()

    def convert(self, change: Callable[[torch.nn.Module], None], through: torch.dtype) -> None:
        """Change the types of the module's weights with `change`; from now on they are read through the type
        `through`."""
        import torch

        for name in self._names:
            tensor = self._tensor(name)
            self._put(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        change(self._module)
        self._through = through
        self._hollow()

    def _load(self, names: tuple[str, ...]) -> Callable[..., None]:
        def load(module: Any, args: Any) -> None:
            if self._turns is not None:
                self._turns.pause()
            if names not in self._inside:
                self._leave()
                read = self.reading.part(names, keep=self._turns is not None)
                for name, values in zip(names, read, strict=True):
                    self._set(name, values)
            self._inside[names] = self._inside.get(names, 0) + 1

        return load

    def _set(self, name: str, values: torch.Tensor) -> None:
        dtype = self._tensor(name).dtype
        layers = self._merges.get(name, ())
        if layers and self._turns is not None:
            values = values.clone()
        for layer in layers:
            values = _merged(layer, values)
        values = (values if self._through is None else values.to(self._through)).to(dtype)
        self._put(name, values)
        if self._turns is not None and self._through is not None and dtype == self._through:
            self.wide[values.data_ptr()] = values.float()

    def _unload(self, names: tuple[str, ...]) -> Callable[..., None]:
        def unload(module: Any, args: Any, output: Any) -> None:
            if names in self._inside:  # otherwise it never ran
                self._inside[names] -= 1
            if self._turns is None:
                self._leave()

        return unload

    def _leave(self) -> None:
        """Free the values of every part that no run is in."""
        for names in [names for names, runs in self._inside.items() if not runs]:
            self._hollow(names)
            self.wide.clear()
            del self._inside[names]

    def _hollow(self, names: Sequence[str] | None = None) -> None:
        """Remove the values."""
        import torch

        for name in self._names if names is None else names:
            tensor = self._tensor(name)
            nothing = torch.full((1,) * tensor.dim(), float("nan"), dtype=tensor.dtype)
            self._put(name, nothing.expand(tensor.shape))

    def _tensor(self, name: str) -> torch.Tensor:
        owner, leaf = self._place(name)
        tensor: torch.Tensor = getattr(owner, leaf)
        return tensor

    def _put(self, name: str, values: torch.Tensor) -> None:
        import torch

        owner, leaf = self._place(name)
        is_parameter = isinstance(getattr(owner, leaf), torch.nn.Parameter)
        setattr(owner, leaf, torch.nn.Parameter(values, requires_grad=False) if is_parameter else values)

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._module.get_submodule(path), leaf


def _merged(layer: Any, values: torch.Tensor) -> torch.Tensor:
    """The weight with one LoRA merged by PEFT."""
    import torch

    base = layer.get_base_layer()
    before = base.weight
    base.weight = torch.nn.Parameter(values, requires_grad=False)
    layer.merge(safe_merge=True)
    merged: torch.Tensor = base.weight.detach()
    layer.merged_adapters.clear()
    base.weight = before
    return merged


def _parts(module: torch.nn.Module, most: int, path: str = "") -> Iterator[tuple[torch.nn.Module, list[str]]]:
    """The modules whose weights are read together, with the names of these. A module's other weights stay while its
    forward runs."""
    for name, child in module.named_children():
        inner = f"{path}{name}."
        tensors = child.state_dict()
        if not tensors:
            continue
        whole = 4 * sum(tensor.numel() for tensor in tensors.values()) <= most
        if _is_called(child) and (whole or not [*child.children()]):
            yield child, [f"{inner}{key}" for key in tensors]
            continue
        if own := [key for key in tensors if "." not in key]:
            yield child, [f"{inner}{key}" for key in own]
        yield from _parts(child, most, inner)


def _is_called(module: torch.nn.Module) -> bool:
    """Whether it has a forward of its own; lists of modules have none."""
    import torch

    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


CACHES = "use_cache"
UNSAID = (("output_hidden_states", False), ("output_attentions", False))
"""Arguments of a text encoder with no effect at these values: a call without them is equivalent."""


class RowsOnce:
    """A text encoder's forward that computes each row of tokens once: one pass over the weights serves all prompts, and
    both precisions if there is a second module in 16 bits."""

    def __init__(
        self, module: torch.nn.Module, half: Forward | None = None, side_by_side: SideBySide | None = None
    ) -> None:
        """half: the forward of the 16-bit module. side_by_side: runs two functions concurrently."""
        self._forward = module.forward
        self._half, self._side_by_side = half, side_by_side
        self._signature = inspect.signature(module.forward)
        self._rows: dict[Any, list[torch.Tensor]] = {}
        self._half_rows: dict[Any, list[torch.Tensor]] = {}
        self._specs: dict[Any, Any] = {}
        module.forward = self

    def forget(self) -> None:
        """Drop rows computed with the float32 weights, which are now in 16 bits."""
        self._rows, self._half_rows, self._half = self._half_rows, {}, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_unflatten

        given = self._signature.bind(*args, **kwargs)
        if CACHES in self._signature.parameters:  # key-value caches serve only generation of text
            given.arguments[CACHES] = False
        tensors = {name: value for name, value in given.arguments.items() if isinstance(value, torch.Tensor)}
        flags = {name: value for name, value in _flat(given.arguments) if name not in tensors}
        call = repr(sorted(item for item in flags.items() if item not in UNSAID))
        keys = [
            (call, *((name, _bytes(row)) for name, row in zip(tensors, rows, strict=True)))
            for rows in zip(*tensors.values(), strict=True)
        ]
        missing = {key: index for index, key in enumerate(keys) if key not in self._rows}
        if missing:
            chosen = torch.tensor([*missing.values()])
            given.arguments.update({name: value[chosen] for name, value in tensors.items()})
            self._compute(call, [*missing], given)
        together = zip(*(self._rows[key] for key in keys), strict=True)
        return tree_unflatten([torch.cat(leaves) for leaves in together], self._specs[call])

    def _compute(self, call: str, keys: Sequence[Any], given: inspect.BoundArguments) -> None:
        from torch.utils._pytree import tree_flatten

        def run(forward: Forward, rows: dict[Any, list[torch.Tensor]]) -> None:
            leaves, self._specs[call] = tree_flatten(forward(*given.args, **given.kwargs))
            for row, key in enumerate(keys):
                rows[key] = [leaf[row : row + 1] for leaf in leaves]

        half = self._half
        if half is None or self._side_by_side is None:
            run(self._forward, self._rows)
        else:
            self._side_by_side(lambda: run(self._forward, self._rows), lambda: run(half, self._half_rows))


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments by name, including those passed through **kwargs."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _bytes(row: torch.Tensor) -> bytes:
    """Bytes of a row; ids and masks compare equal in any integer type."""
    return bytes((row if row.is_floating_point() else row.long()).numpy().tobytes())
