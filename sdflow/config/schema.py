"""The JSON Schema of workflow files (draft 2020-12, https://json-schema.org/draft/2020-12), for editors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from sdflow.config.catalog import PassCatalog
from sdflow.config.fields import (
    MATRIX,
    MOST_ADAPTERS,
    MOST_LORAS,
    MOST_NETS,
    NET_NAME,
    OVERLAY,
    PRECISIONS,
    REFINER,
    STEP,
    SUBMODEL,
    WORKFLOW,
    AdapterFields,
    CacheFields,
    EvaluateFields,
    GenerateFields,
    LoraFields,
    VerifyFields,
)
from sdflow.config.patch import INSERTING
from sdflow.families import any_family
from sdflow.targets import TARGETS

Schema = dict[str, Any]

_OWN_PASS = r"\.py:[A-Za-z_][A-Za-z0-9_]*$"
_TEXT: Schema = {"type": "string", "minLength": 1}
_ONCE: Schema = {"not": {"$ref": "#/$defs/inserted_twice"}}


def json_schema(catalog: PassCatalog) -> Schema:
    """Return the schema of a workflow file, with every pass of the catalog and its options.

    No top-level key or pass option is required: the files that a workflow extends can supply them.
    """
    defs: Schema = {}
    lora = _model(LoraFields, "lora", defs, partial=False)
    adapter = _model(AdapterFields, "ip_adapter", defs, partial=False)
    evaluate = _or_null(_model(EvaluateFields, "evaluate", defs))
    level = {"enum": ["quick", "full", "off", True, False, None]}
    verify = {"anyOf": [_model(VerifyFields, "verify", defs), level]}
    count = {"type": ["integer", "null"], "minimum": 0}
    expect = {"type": ["object", "null"], "additionalProperties": count, "description": STEP["expect"]}
    names = sorted(catalog.names())
    options = {name: _model(catalog.find(name, Path()).options, name, defs) for name in names}
    a_pass: list[Schema] = [{"enum": names}, {"type": "string", "pattern": _OWN_PASS}]
    for key in INSERTING:
        defs[key] = {**_or_null(*a_pass), "description": STEP[key]}
    defs["inserted_twice"] = {"properties": dict.fromkeys(INSERTING, _TEXT), "required": list(INSERTING)}
    more = {"expect": expect, **{key: _ref(key) for key in INSERTING}}
    changed = {name: _change(schema, more) for name, schema in options.items()}
    own = {"type": ["object", "null"], "properties": more, **_ONCE}
    defs["target"] = {"enum": list(TARGETS), "description": "; ".join(f"{t.name}: {t.title}" for t in TARGETS.values())}
    defs["loras"] = {"type": "array", "maxItems": MOST_LORAS, "items": lora}
    defs["step"] = {
        "type": "object",
        "required": ["pass"],
        "properties": {"pass": {"anyOf": a_pass, "description": STEP["pass"]}, "expect": expect},
        "allOf": [
            {
                "if": {"properties": {"pass": {"const": name}}, "required": ["pass"]},
                "then": {**schema, "properties": {"pass": True, "expect": True, **schema["properties"]}},
            }
            for name, schema in options.items()
        ],
    }
    defs["changes"] = _object(
        changed,
        "From pass name to changed options; null removes the steps of that name, insert_before or insert_after adds one.",
    )
    defs["changes"]["patternProperties"] = {_OWN_PASS: own}
    chain = {"type": "array", "minItems": 1, "items": _ref("step")}
    passes = {"anyOf": [chain, _ref("changes")]}
    off = {"enum": [None, False]}
    precision = {"enum": [*PRECISIONS, None]}
    defs["submodel"] = {"anyOf": [_described(SUBMODEL, {"passes": passes, "precision": precision}), off]}
    submodels = {name: {**_ref("submodel"), "description": text} for name, text in any_family.submodels().items()}
    defs["submodels"] = _object(submodels)
    defs["overlay"] = _described(
        OVERLAY, {"passes": _ref("changes"), "submodels": _ref("submodels"), "evaluate": evaluate, "verify": verify}
    )
    defs["matrix"] = _described(
        MATRIX,
        {
            "model": _listed(_TEXT),
            "loras": _listed(_ref("loras")),
            "target": {"type": "array", "minItems": 1, "items": _ref("target")},
        },
    )
    exchangeable, omittable = any_family.exchangeable_components(), any_family.omittable_components()
    components = {name: {**_or_null(_TEXT), "description": about} for name, about in exchangeable.items()}
    components |= {
        name: {"type": "null", "description": about} for name, about in omittable.items() if name not in exchangeable
    }
    nets = {
        "type": "object",
        "additionalProperties": False,
        "maxProperties": MOST_NETS,
        "patternProperties": {f"^{NET_NAME}$": _or_null(_TEXT)},
    }
    top = _described(
        WORKFLOW,
        {
            "extends": _one_or_list(_TEXT),
            "name": _TEXT,
            "model": _TEXT,
            "components": _or_null(_object(components)),
            "controlnets": _or_null(nets),
            "ip_adapters": _or_null({"type": "array", "maxItems": MOST_ADAPTERS, "items": adapter}),
            "refiner": _or_null(
                _TEXT, {**_described(REFINER, {"extends": _TEXT, "model": _TEXT}), "required": ["extends"]}
            ),
            "target": _one_or_list(_ref("target")),
            "targets": _object({name: {**_ref("overlay"), "description": t.title} for name, t in TARGETS.items()}),
            "loras": _or_null(_ref("loras")),
            "matrix": _ref("matrix"),
            "submodels": _ref("submodels"),
            "evaluate": evaluate,
            "generate": _or_null(_model(GenerateFields, "generate", defs)),
            "verify": verify,
            "carry_weights": {"type": "boolean"},
            "allow_pickle": {"type": "boolean"},
            "cache": _or_null(_model(CacheFields, "cache", defs)),
        },
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sdflow workflow", **top, "$defs": defs}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(properties: Mapping[str, Schema], description: str | None = None) -> Schema:
    about = {"description": description} if description else {}
    return {"type": "object", **about, "properties": dict(properties), "additionalProperties": False}


def _described(texts: Mapping[str, str], schemas: Mapping[str, Schema]) -> Schema:
    """An object with exactly the keys of `texts`."""
    return _object({key: {**schemas[key], "description": text} for key, text in texts.items()})


def _one_or_list(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "minItems": 1, "items": schema}]}


def _listed(schema: Schema) -> Schema:
    """A list, or a map from a short name to each value."""
    named = {"type": "object", "minProperties": 1, "additionalProperties": schema}
    return {"anyOf": [{"type": "array", "minItems": 1, "items": schema}, named]}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _model(model: type[BaseModel], name: str, defs: Schema, *, partial: bool = True) -> Schema:
    """The schema of a pydantic model; nested models go to `defs` under their own names.

    partial: no field is required.
    """
    schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}", schema_generator=_Untitled)
    for inner, definition in schema.pop("$defs", {}).items():
        defs[f"{name}.{inner}"] = definition
    for key in ("title", "required") if partial else ("title",):
        schema.pop(key, None)
    return {"properties": {}, **schema}


def _change(options: Schema, more: Schema) -> Schema:
    """A schema for changed options: any may be missing."""
    return _or_null({**options, **_ONCE, "properties": {**more, **options["properties"]}})
