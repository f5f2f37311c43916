"""The sizes of a graph's axes, and the shapes of its values, when its inputs have given shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdflow.errors import PassError, VerificationError
from sdflow.runtime.sessions.engine_cache import Profile, Shapes
from sdflow.runtime.sessions.specialize import specialize

if TYPE_CHECKING:
    import onnx


def free_dimensions(model: onnx.ModelProto, shapes: Shapes, where: str) -> dict[str, int]:
    """The sizes of the model's named dimensions when its inputs have these shapes. where: for errors, its path.

    Raises VerificationError when a dimension stays free, or two inputs want different sizes of one dimension.
    """
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        axes = value.type.tensor_type.shape.dim
        shape = shapes.get(value.name)
        if shape is None and not any(axis.dim_param for axis in axes):
            continue  # a part of a graph has inputs of its own, whose shapes are fixed
        if shape is None or len(shape) != len(axes):
            raise VerificationError(f"no shape is known for its input {value.name}", where=where)
        for axis, size in zip(axes, shape, strict=True):
            if axis.HasField("dim_value") and axis.dim_value != size:
                raise VerificationError(f"{value.name} has size {axis.dim_value}, not {size}", where=where)
            if axis.dim_param and sizes.setdefault(axis.dim_param, size) != size:
                raise VerificationError(
                    f"dimension {axis.dim_param} would be {sizes[axis.dim_param]} and {size} at once", where=where
                )
    return sizes


def folded(model: onnx.ModelProto, shapes: Shapes, where: str) -> onnx.ModelProto:
    """The model for inputs of these shapes, without shape arithmetic. Raises VerificationError as `free_dimensions`, and where
    its shapes cannot be followed."""
    try:
        return specialize(model, free_dimensions(model, shapes, where))
    except PassError as error:
        raise VerificationError(error.what, where=where, remedy=error.remedy) from error


def profile_of_graph(profile: Profile, model: onnx.ModelProto, where: str) -> Profile:
    """What TensorRT's provider is told: the profile of the inputs that have a free axis, and of the values within.

    Where its parser takes only a part of the graph, the inputs of what it takes are values within, and the provider asks for the
    shapes of each that has a free axis: "User needs to provide all the dynamic shape inputs with associated profiles". Which
    those are it finds out itself, so it is told of all; it passes over those that are no inputs. profile: of the graph's inputs.
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
            except PassError:  # an operator whose shapes nobody knows: the provider names what it lacks, if anything
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
    """Of the values that nodes make, but for scalars and those whose names the provider's options cannot hold."""
    fixed = specialize(model, free_dimensions(model, shapes, where))
    return {
        item.name: tuple(axis.dim_value for axis in item.type.tensor_type.shape.dim)
        for item in fixed.graph.value_info
        if item.type.tensor_type.shape.dim and not set(item.name) & set(":,")
    }


def _with_free_axes(model: onnx.ModelProto) -> set[str]:
    """The inputs that have an axis without a size: the only ones that may be in a profile."""
    given = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name
        for value in model.graph.input
        if value.name not in given and any(not axis.HasField("dim_value") for axis in value.type.tensor_type.shape.dim)
    }
