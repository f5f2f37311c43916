"""A PyTorch module whose weights are larger than memory: those of a part are read before its forward, and let go after it.

The module is the library's own, and so is its forward: hooks put the values in. Elsewhere a weight has its shape and type and
no values (NaN throughout, in the memory of one number), so that one that is used out of its turn shows in every result.
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
"""Threads that read weights: reading is conversion, of one tensor after the other."""
Read = Callable[[str], "torch.Tensor"]
"""Gives a parameter or buffer in float32, by its name in the state_dict."""
Merges = Mapping[str, Sequence[Any]]
"""Weight -> PEFT's layers that are to be merged into it, in order."""
Forward = Callable[..., Any]
Beside = Callable[[Callable[[], None], Callable[[], None]], None]


class Reading:
    """Reads the weights of a part, and keeps the part that was read last, for other modules that need the same one next."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self._last: tuple[str, ...] = ()
        self._values: list[torch.Tensor] = []

    def part(self, names: Sequence[str], *, keep: bool) -> list[torch.Tensor]:
        """The values of these weights in float32, which nobody may change. keep: until another part is read."""
        if tuple(names) == self._last:
            return self._values
        self.forget()
        with ThreadPoolExecutor(READERS) as pool:
            values = [*pool.map(self.read, names)]
        if keep:
            self._last, self._values = tuple(names), values
        return values

    def forget(self) -> None:
        """Let go of what is kept."""
        self._last, self._values = (), []


class StreamedWeights:
    """Puts a module's weights in their places while they are needed."""

    def __init__(self, module: torch.nn.Module, read: Read, most: int, merges: Merges) -> None:
        """most: bytes of weights, as float32, that are in memory at a time; more only where one module has them by itself."""
        self._module, self.reading, self._merges = module, Reading(read), merges
        self._through: torch.dtype | None = None
        self._turns: Turns | None = None
        self.wide: dict[int, torch.Tensor] = {}
        self._inside: dict[tuple[str, ...], int] = {}
        names = module.state_dict().keys()
        own = {
            name for name in names if "." not in name
        }  # of the module itself, whose forward may not be what is called
        self._names = [name for name in names if name not in own]
        for name in own:
            self._put(name, read(name))
        self._hollow()
        for part, names in _parts(module, most):
            part.register_forward_pre_hook(self._load(tuple(names)))
            part.register_forward_hook(self._unload(tuple(names)), always_call=True)

    def take_turns(self, turns: Turns, reading: Reading) -> None:
        """From here on runs of `turns` share the module, and it shares `reading` with others of the same weights: a part stays
        until all runs have passed it, its halves beside what they are in float32 (`wide`, by their address)."""
        self._turns, self.reading = turns, reading

    def alone(self) -> None:
        """The end of `take_turns`."""
        self._turns = None
        self.reading.forget()
        self._leave()

    def convert(self, change: Callable[[torch.nn.Module], None], through: torch.dtype) -> None:
        """Change the types of the module's weights to `through`, or others behind that. From here on they are read so."""
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
            if names in self._inside:  # else its turn never came
                self._inside[names] -= 1
            if self._turns is None:
                self._leave()

        return unload

    def _leave(self) -> None:
        """Take the values away of every part that no run is in."""
        for names in [names for names, runs in self._inside.items() if not runs]:
            self._hollow(names)
            self.wide.clear()
            del self._inside[names]

    def _hollow(self, names: Sequence[str] | None = None) -> None:
        """Take the values away."""
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
    """The weight with one LoRA in it, as PEFT merges it."""
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
    """The modules within this one whose weights are read together, and the names of these. What a module has beside its parts is
    there for as long as its forward runs."""
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
    """Whether it has a forward of its own: lists of modules have none."""
    import torch

    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


CACHES = "use_cache"
UNSAID = (("output_hidden_states", False), ("output_attentions", False))
"""Arguments of a text encoder that change nothing: a call without them means the same."""


class RowsOnce:
    """A text encoder's forward that computes each row of tokens once: one pass over the weights serves all prompts, and both
    precisions where there is another module in 16 bits."""

    def __init__(self, module: torch.nn.Module, half: Forward | None = None, beside: Beside | None = None) -> None:
        """half: the same forward in 16 bits. beside: runs two functions side by side."""
        self._forward = module.forward
        self._half, self._beside = half, beside
        self._signature = inspect.signature(module.forward)
        self._rows: dict[Any, list[torch.Tensor]] = {}
        self._half_rows: dict[Any, list[torch.Tensor]] = {}
        self._specs: dict[Any, Any] = {}
        module.forward = self

    def forget(self) -> None:
        """The rows, whose weights have changed since: they are in 16 bits."""
        self._rows, self._half_rows, self._half = self._half_rows, {}, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_unflatten

        given = self._signature.bind(*args, **kwargs)
        if (
            CACHES in self._signature.parameters
        ):  # of keys and values, which a text that is not continued has no use for
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
        if half is None or self._beside is None:
            run(self._forward, self._rows)
        else:
            self._beside(lambda: run(self._forward, self._rows), lambda: run(half, self._half_rows))


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments by name, those that a signature does not name among them."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _bytes(row: torch.Tensor) -> bytes:
    """Ids and masks are the same in any type of whole numbers."""
    return bytes((row if row.is_floating_point() else row.long()).numpy().tobytes())
