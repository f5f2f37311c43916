"""Nodes of a graph that is put together: each is given a name, and gives the name of what it makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

EXTENSIONS, EXTENSIONS_VERSION = "ai.onnx.contrib", 1
"""The operators of onnxruntime-extensions. A program registers its library before it makes a session."""


class Builder:
    """Collects nodes and initializers. prefix: of all names that it makes up."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._prefix = prefix
        self._count = 0

    def add(self, kind: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        """A node of ONNX's own operators with one output, which is named `to`; its output's name."""
        made = self._name(kind) if to is None else to
        self._node(kind, inputs, [made], **attributes)
        return made

    def constant(self, value: Any, dtype: str) -> str:
        """An initializer of these values; its name."""
        from onnx import numpy_helper

        name = self._name("constant")
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def text(self, value: str) -> str:
        """An initializer of one string."""
        from onnx import TensorProto, helper

        name = self._name("constant")
        self.initializers.append(helper.make_tensor(name, TensorProto.STRING, [1], [value.encode()]))
        return name

    def extension(self, kind: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """A node of onnxruntime-extensions; its outputs' names. More of them may be there behind these."""
        made = [self._name(kind) for _ in range(outputs)]
        self._node(kind, inputs, made, domain=EXTENSIONS, **attributes)
        return made

    def include(self, nodes: Iterable[Any], initializers: Iterable[Any]) -> None:
        """Put a part in that is made already."""
        self.nodes.extend(nodes)
        self.initializers.extend(initializers)

    def whole(self, *values: int) -> str:
        """A vector of whole numbers."""
        return self.constant(values, "int64")

    def cast(self, value: str, element: int, to: str | None = None) -> str:
        """The same values as elements of this type (TensorProto's number)."""
        made = self._name("Cast") if to is None else to
        self._node("Cast", [value], [made], to=element)
        return made

    def size(self, value: str, axis: int) -> str:
        """How long a value is along an axis: a vector of one number."""
        return self.add("Shape", value, start=axis, end=axis + 1)

    def joined(self, *values: str, axis: int = 0, to: str | None = None) -> str:
        """Values one behind the other."""
        return self.add("Concat", *values, to=to, axis=axis)

    def split(self, value: str, to: Sequence[str], axis: int) -> None:
        """Cut into equal parts of these names."""
        self._node("Split", [value], to, axis=axis)

    def part(self, value: str, begin: Sequence[int] | str, end: Sequence[int] | str, axes: Sequence[int]) -> str:
        """From `begin` up to `end` along these axes."""
        bounds = [each if isinstance(each, str) else self.whole(*each) for each in (begin, end)]
        return self.add("Slice", value, *bounds, self.whole(*axes))

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{self._prefix}/{kind}_{self._count}"

    def _node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{outputs[0]}/node", **attributes))
