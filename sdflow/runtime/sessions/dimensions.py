"""Sizes of a graph's axes and shapes of its values for given input shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdflow.errors import PassError, VerificationError
from sdflow.runtime.sessions.engine_cache import Profile, Shapes
from sdflow.runtime.sessions.specialize import specialize

if TYPE_CHECKING:
    import onnx


def free_dimensions(model: onnx.ModelProto, shapes: Shapes, where: str) -> dict[str, int]:
    """Return the sizes of the model's named dimensions for these input shapes. where: its path, for errors.

    Raises VerificationError if a dimension stays free, or two inputs disagree on its size.
    """
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        axes = value.type.tensor_type.shape.dim
        shape = shapes.get(value.name)
        if shape is None and not any(axis.dim_param for axis in axes):
            continue  # additional inputs of a graph's part have fixed shapes
        if shape is None or len(shape) != len(axes):
            raise VerificationError(f"no shape is given for its input {value.name}", where=where)
        for axis, size in zip(axes, shape, strict=True):
            if axis.HasField("dim_value") and axis.dim_value != size:
                raise VerificationError(f"{value.name} has size {axis.dim_value}, not {size}", where=where)
            if axis.dim_param and sizes.setdefault(axis.dim_param, size) != size:
                raise VerificationError(
                    f"dimension {axis.dim_param} has conflicting sizes {sizes[axis.dim_param]} and {size}", where=where
                )
    return sizes


def folded(model: onnx.ModelProto, shapes: Shapes, where: str) -> onnx.ModelProto:
    """Return the model for these input shapes, without shape arithmetic. Raises VerificationError like
    `free_dimensions`, and if its shapes cannot be inferred."""
    try:
        return specialize(model, free_dimensions(model, shapes, where))
    except PassError as error:
        raise VerificationError(error.what, where=where, remedy=error.remedy) from error


def profile_of_graph(profile: Profile, model: onnx.ModelProto, where: str) -> Profile:
    """Return the profile for TensorRT's provider: of inputs with a free axis, and of inner values.

    If its parser only accepts a part of the graph, that part's inputs are inner values, and the provider requires
    shapes for each one with a free axis: "User needs to provide all the dynamic shape inputs with associated profiles".
    Which values these are is unknown beforehand, so the profile includes all; the provider ignores the rest. profile:
    of the graph's inputs.
    """
    inputs = profile.only(_with_free_axes(model))
    if not inputs.usual:
        return inputs
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    known: list[tuple[Shapes, dict[str, tuple[int, ...]]]] = []
    for extreme, shapes in vars(profile).items():
        within = next((made for given, made in known if given == shapes), None)
        if within is None:
            try:
                within = _shapes_within(model, shapes, where)
            except PassError:  # an operator of unknown shape: the provider names missing profiles, if any
                return inputs
            known.append((shapes, within))
        found[extreme] = within
    kept = set.intersection(*(set(each) for each in found.values()))
    return Profile(
        *(
            {**getattr(inputs, extreme), **{name: each[name] for name in each if name in kept}}
            for extreme, each in found.items()
        )
    )


def _shapes_within(model: onnx.ModelProto, shapes: Shapes, where: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inner values, except scalars and names that the provider's options cannot express."""
    fixed = specialize(model, free_dimensions(model, shapes, where))
    return {
        item.name: tuple(axis.dim_value for axis in item.type.tensor_type.shape.dim)
        for item in fixed.graph.value_info
        if item.type.tensor_type.shape.dim and not set(item.name) & set(":,")
    }


def _with_free_axes(model: onnx.ModelProto) -> set[str]:
    """Return the inputs with an axis of unknown size; only these may be in a profile."""
    given = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name
        for value in model.graph.input
        if value.name not in given and any(not axis.HasField("dim_value") for axis in value.type.tensor_type.shape.dim)
    }
