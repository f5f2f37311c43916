"""A PyTorch module whose weights are larger than memory: those of a part are read before its forward, and let go after it.

The module is the library's own, and so is its forward: hooks put the values in. Elsewhere a weight has its shape and type and
no values (NaN throughout, in the memory of one number), so that one that is used out of its turn shows in every result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Read = Callable[[str], "torch.Tensor"]
"""Gives a parameter or buffer in float32, by its name in the state_dict."""
Merges = Mapping[str, Sequence[Any]]
"""Weight -> PEFT's layers that are to be merged into it, in order."""


class StreamedWeights:
    """Puts a module's weights in their places while they are needed."""

    def __init__(self, module: torch.nn.Module, read: Read, most: int, merges: Merges) -> None:
        """most: bytes of weights, as float32, that are in memory at a time; more only where one module has them by itself."""
        self._module, self._read, self._merges = module, read, merges
        self._through: torch.dtype | None = None
        names = module.state_dict().keys()
        own = {
            name for name in names if "." not in name
        }  # of the module itself, whose forward may not be what is called
        self._names = [name for name in names if name not in own]
        for name in own:
            self._put(name, read(name))
        self._hollow()
        for part, names in _parts(module, most):
            part.register_forward_pre_hook(self._load(names))
            part.register_forward_hook(self._unload(names), always_call=True)

    def convert(self, change: Callable[[torch.nn.Module], None], through: torch.dtype) -> None:
        """Change the types of the module's weights to `through`, or others behind that. From here on they are read so."""
        import torch

        for name in self._names:
            tensor = self._tensor(name)
            self._put(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        change(self._module)
        self._through = through
        self._hollow()

    def _load(self, names: Sequence[str]) -> Callable[..., None]:
        def load(module: Any, args: Any) -> None:
            for name in names:
                dtype, values = self._tensor(name).dtype, self._read(name)
                for layer in self._merges.get(name, ()):
                    values = _merged(layer, values)
                self._put(name, (values if self._through is None else values.to(self._through)).to(dtype))

        return load

    def _unload(self, names: Sequence[str]) -> Callable[..., None]:
        def unload(module: Any, args: Any, output: Any) -> None:
            self._hollow(names)

        return unload

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


class RowsOnce:
    """A text encoder's forward that computes each row of tokens once: one pass over the weights serves all prompts."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._rows: dict[Any, list[torch.Tensor]] = {}
        self._specs: dict[Any, Any] = {}
        module.forward = self

    def forget(self) -> None:
        """The rows, whose weights have changed since."""
        self._rows.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_flatten, tree_unflatten

        given = self._signature.bind(*args, **kwargs)
        tensors = {name: value for name, value in given.arguments.items() if isinstance(value, torch.Tensor)}
        call = repr([item for item in given.arguments.items() if item[0] not in tensors])
        keys = [
            (call, *((name, str(row.dtype), row.numpy().tobytes()) for name, row in zip(tensors, rows, strict=True)))
            for rows in zip(*tensors.values(), strict=True)
        ]
        missing = {key: index for index, key in enumerate(keys) if key not in self._rows}
        if missing:
            chosen = torch.tensor([*missing.values()])
            given.arguments.update({name: value[chosen] for name, value in tensors.items()})
            leaves, self._specs[call] = tree_flatten(self._forward(*given.args, **given.kwargs))
            for row, key in enumerate(missing):
                self._rows[key] = [leaf[row : row + 1] for leaf in leaves]
        together = zip(*(self._rows[key] for key in keys), strict=True)
        return tree_unflatten([torch.cat(leaves) for leaves in together], self._specs[call])
