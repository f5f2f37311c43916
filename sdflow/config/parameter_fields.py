"""Fields of pydantic models, made from declared parameters (`sdflow.parameter`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic.fields import FieldInfo

from sdflow.disk.input_file import parse_json
from sdflow.parameter import Parameter

Model = TypeVar("Model", bound=BaseModel)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"there is half of a character at position {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text without lone surrogates, which JSON can contain and tokenizers cannot encode."""


def field_of(parameter: Parameter, default: Any) -> Any:
    """A field with the parameter's limits and description; the annotation must match its kind."""
    about = parameter.described if default == parameter.default else parameter.about
    return Field(default, description=about, **(_limits(parameter) if parameter.kind in (int, float) else {}))


def _limits(parameter: Parameter) -> dict[str, Any]:
    limits = {"ge": parameter.least, "le": parameter.most, "gt": parameter.above}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return given | ({"allow_inf_nan": False} if parameter.kind is float else {})


def with_fields(declared: Mapping[str, Parameter]) -> Callable[[type[Model]], type[Model]]:
    """Decorate a model: add a field for each of these parameters. null stands for the default."""

    def extended(model: type[Model]) -> type[Model]:
        fields: dict[str, tuple[Any, FieldInfo]] = {
            name: (_annotation(each), field_of(each, each.default)) for name, each in declared.items()
        }
        made: type[Model] = create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
        )  # type: ignore[call-overload]
        return made

    return extended


def _annotation(parameter: Parameter) -> Any:
    kind = Text if parameter.kind is str else parameter.kind
    if (origin := get_origin(kind)) in (tuple, list):
        kind = origin[tuple(Annotated[each, Field(**_limits(parameter))] for each in get_args(kind))]
    if (read := parameter.read) is None:
        return kind | None

    def value_of(given: Any) -> Any:
        """Parse a text, as from a form, as JSON or like an option; return other values unchanged."""
        if not isinstance(given, str):
            return given
        return parse_json(given) if given.startswith("[") else read(given)

    return Annotated[kind | None, BeforeValidator(value_of)]
