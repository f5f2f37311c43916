"""Building blocks of lowerings: fresh names, element types, and rounding to 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sdflow.errors import VerificationError

FLOAT, FLOAT16, BFLOAT16 = 1, 10, 16
"""onnx.TensorProto.FLOAT, FLOAT16 and BFLOAT16."""
HALVES = (FLOAT16, BFLOAT16)

COPY = "/float32"
"""Suffix of the float32 copy of a 16-bit value."""


class Builder:
    """The lowered graph under construction.

    Every value of the artifact keeps its name and element type. For a 16-bit value, operators read its float32 copy
    (`wide`), compute in float32, and `result` rounds once to 16 bits. Both conversions are explicit Casts: ONNX Runtime
    keeps those, while it merges away Casts that it inserts itself.
    """

    def __init__(self, types: Mapping[str, int], shapes: Mapping[str, Sequence[int | str | None]], *, round_fp16: bool):
        self.types = dict(types)
        self.shapes = dict(shapes)
        self.round_fp16 = round_fp16
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.node_of: dict[str, str] = {}
        self._node = ""
        self._wide: dict[str, str] = {}
        self._constants: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = set()

    def begin(self, node_name: str) -> None:
        """Start the lowering of the artifact's node `node_name`."""
        self._node = node_name

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add an operator with one output and return the output's new name. Attributes that are None are omitted."""
        name = self._fresh(f"{self._node}/{op_type}")
        self.add(op_type, inputs, [name], domain=domain, **attributes)
        return name

    def split(self, value: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """Split `value` along `axis` into parts of these sizes."""
        if len(sizes) == 1:
            return [value]
        names = [self._fresh(f"{self._node}/Split") for _ in sizes]
        self.add("Split", [value, self.ints(*sizes)], names, axis=axis)
        return names

    def add(
        self, op_type: str, inputs: Iterable[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        """Add an operator with named outputs."""
        import onnx

        given = {name: value for name, value in attributes.items() if value is not None}
        name = f"{self._node}/{op_type}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), list(outputs), name, domain=domain, **given))
        for output in outputs:
            self.node_of[output] = self._node

    def wide(self, value: str) -> str:
        """The float32 copy of a 16-bit value of the artifact; any other value itself."""
        if self.types.get(value) not in HALVES:
            return value
        if value not in self._wide:
            copy = self._wide[value] = self._fresh(f"{value}{COPY}")
            self.add("Cast", [value], [copy], to=FLOAT)
            self.node_of[copy] = self.node_of.get(value, "")
        return self._wide[value]

    def rounded(self, value: str, element_type: int) -> str:
        """A float32 value as it reads back after storage as `element_type`."""
        if element_type not in HALVES or not self.round_fp16:
            return value
        return self.op("Cast", self.op("Cast", value, to=element_type), to=FLOAT)

    def result(self, value: str, name: str, element_type: int) -> None:
        """Make the float32 `value` the artifact's value `name`, stored as `element_type`."""
        if element_type in HALVES and not self.round_fp16:
            element_type = FLOAT
        self.types[name] = element_type
        if element_type == FLOAT:
            self.add("Identity", [value], [name])
        else:
            self.add("Cast", [value], [name], to=element_type)

    def ints(self, *values: int) -> str:
        """A vector of int64."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def constant(self, array: Any) -> str:
        """An initializer with these values; equal ones are stored once."""
        import onnx

        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self._fresh(f"lowering/constant_{len(self._constants)}")
            self.constants.append(onnx.numpy_helper.from_array(array, name))
        return self._constants[key]

    def rank(self, value: str) -> int:
        """Number of dimensions. Raises VerificationError if the artifact does not define it."""
        return len(self.shape(value))

    def shape(self, value: str) -> Sequence[int | str | None]:
        """Dimensions of a value of the artifact. Raises VerificationError if the artifact does not define them."""
        if value not in self.shapes:
            raise VerificationError(
                f"the number of dimensions of {value!r} is unknown, and the operator's result depends on it",
                where=self._node,
                remedy="Run shape inference on the model, so that the value is in its value_info.",
            )
        return self.shapes[value]

    def _fresh(self, wish: str) -> str:
        name, count = wish, 0
        while name in self._taken or name in self.types:
            count += 1
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name


class Node:
    """A node of the artifact, as its lowering reads it: float32 inputs by index, attributes with defaults."""

    def __init__(self, builder: Builder, proto: Any, name: str) -> None:
        import onnx

        self.builder, self.proto, self.name = builder, proto, name
        self.attributes = {item.name: onnx.helper.get_attribute_value(item) for item in proto.attribute}

    def has(self, index: int) -> bool:
        """Whether the optional input is given."""
        return index < len(self.proto.input) and bool(self.proto.input[index])

    def has_output(self, index: int) -> bool:
        """Whether the optional output is used."""
        return index < len(self.proto.output) and bool(self.proto.output[index])

    def raw(self, index: int) -> str:
        """The name of the input in the artifact. Raises VerificationError if it is missing."""
        if not self.has(index):
            raise self.error(f"input {index} is missing")
        return str(self.proto.input[index])

    def input(self, index: int) -> str:
        """The input, in float32 if it had 16 bits."""
        return self.builder.wide(self.raw(index))

    def optional(self, index: int) -> str | None:
        """The input as for `input`; None if it is missing."""
        return self.input(index) if self.has(index) else None

    @property
    def element_type(self) -> int:
        """The element type of the first input: `T` of the contrib operators."""
        return self.builder.types.get(self.raw(0), FLOAT)

    def attribute(self, name: str, default: Any) -> Any:
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def required(self, name: str) -> Any:
        if name not in self.attributes:
            raise self.error(f"attribute {name} is missing")
        return self.attribute(name, None)

    def allow(self, *names: str) -> None:
        """Raises VerificationError for other attributes."""
        unknown = sorted(set(self.attributes) - set(names))
        if unknown:
            raise self.error(f"attribute {', '.join(unknown)} is not supported by the lowering")

    def refuse_inputs(self, names: Mapping[int, str]) -> None:
        """Raises VerificationError if one of these optional inputs is given."""
        for index, what in names.items():
            if self.has(index):
                raise self.error(f"{what} (input {index}) is not supported by the lowering")

    def error(self, what: str) -> VerificationError:
        return VerificationError(
            f"{self.proto.op_type}: {what}",
            where=f"node {self.name}",
            remedy="Verify cannot run this node on a CPU: switch off the fusion that makes it, or extend sdflow.verify.lowering.",
        )
