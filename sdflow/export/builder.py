"""Build nodes of a graph: each is named, and its output's name returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXTENSIONS, EXTENSIONS_VERSION = "ai.onnx.contrib", 1
"""The operators of onnxruntime-extensions, whose library a program registers before it creates a session."""


class Builder:
    """Collects nodes and initializers. prefix: of all generated names."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._prefix = prefix
        self._count = 0

    def add(self, kind: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        """Add a standard ONNX node with one output, named `to`. Returns the output's name."""
        from onnx import helper

        made = self._name(kind) if to is None else to
        self.nodes.append(helper.make_node(kind, list(inputs), [made], name=f"{made}/node", **attributes))
        return made

    def constant(self, value: Any, dtype: str) -> str:
        """Add an initializer with these values. Returns its name."""
        import numpy as np
        from onnx import numpy_helper

        name = self._name("constant")
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def text(self, value: str) -> str:
        """Add an initializer with one string. Returns its name."""
        from onnx import TensorProto, helper

        name = self._name("constant")
        self.initializers.append(helper.make_tensor(name, TensorProto.STRING, [1], [value.encode()]))
        return name

    def extension(self, kind: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """Add a node of onnxruntime-extensions. Returns the names of its first outputs."""
        from onnx import helper

        made = [self._name(kind) for _ in range(outputs)]
        node = helper.make_node(kind, inputs, made, name=f"{made[0]}/node", domain=EXTENSIONS, **attributes)
        self.nodes.append(node)
        return made

    def whole(self, *values: int) -> str:
        """Add a vector of integers."""
        return self.constant(values, "int64")

    def cast(self, value: str, element: int, to: str | None = None) -> str:
        """Cast values to this element type (TensorProto's number)."""
        from onnx import helper

        made = self._name("Cast") if to is None else to
        self.nodes.append(helper.make_node("Cast", [value], [made], name=f"{made}/node", to=element))
        return made

    def size(self, value: str, axis: int) -> str:
        """The size of a value along an axis, as a vector of one number."""
        return self.add("Shape", value, start=axis, end=axis + 1)

    def joined(self, *values: str, axis: int = 0, to: str | None = None) -> str:
        """Concatenate values."""
        return self.add("Concat", *values, to=to, axis=axis)

    def split(self, value: str, to: Sequence[str], axis: int) -> None:
        """Split into equal parts with these names."""
        from onnx import helper

        self.nodes.append(helper.make_node("Split", [value], list(to), name=f"{to[0]}/node", axis=axis))

    def part(self, value: str, begin: Sequence[int] | str, end: Sequence[int] | str, axes: Sequence[int]) -> str:
        """Slice from `begin` to `end` along these axes."""
        bounds = [each if isinstance(each, str) else self.whole(*each) for each in (begin, end)]
        return self.add("Slice", value, *bounds, self.whole(*axes))

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{self._prefix}/{kind}_{self._count}"
