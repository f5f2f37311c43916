"""Numbers and lists of a workflow that no machine could serve are refused at their line, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdflow.config.fields import EvaluateFields, GenerateFields, LoraFields, RemoteFields, VerifyFields

from .test_workflow_errors import only_problem

CHAIN, MERGED = "{passes: [{pass: OnnxConversion}]}", "{passes: [{pass: OnnxConversion}, {pass: LoraMerge}]}"
PARTS = f"text_encoder: {MERGED}, unet: {MERGED}, vae_decoder: {CHAIN}"
HEAD = f"model: synthetic:sd15\ntarget: cpu\nsubmodels: {{{PARTS}}}\n"
MANY = {
    "ControlNets": ("controlnets:\n", "  n{}: synthetic:sd15\n", 3000, 16),
    "IP-Adapters": ("ip_adapters:\n", "  - {{file: synthetic:ip-adapter}}\n", 3000, 16),
    "LoRAs": ("loras:\n", "  - {{file: a{}.safetensors}}\n", 3000, 100),
}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("evaluate: {latency: {runs: 1000000000000000000000000000000}}", 4, "less than or equal to 10000"),
        ("evaluate: {latency: {warmup: 1001}}", 4, "less than or equal to 1000"),
        ("evaluate:\n  image:\n    steps: 1000000000000", 6, "less than or equal to 10000"),
        ("evaluate: {image: {guidance_scale: 1.0e+30}}", 4, "less than or equal to 1000"),
        ("verify: {steps: 10001}", 4, "less than or equal to 10000"),
        ("generate: {steps: 10001}", 4, "less than or equal to 10000"),
        ("generate: {guidance_scale: 1.0e+30}", 4, "less than or equal to 1000"),
        ("loras: [{file: a.safetensors, scale: 1.0e+30}]", 4, "less than or equal to 100"),
    ],
)
def test_a_number_beyond_all_use_is_refused_at_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    found = only_problem(tmp_path, HEAD + text)
    assert found.line == line and says in found.message


@pytest.mark.parametrize("kind", MANY)
def test_more_than_a_pipeline_can_have_are_refused_once_at_the_first_too_many(tmp_path: Path, kind: str) -> None:
    key, entry, count, most = MANY[kind]
    found = only_problem(tmp_path, HEAD + key + "".join(entry.format(number) for number in range(count)))
    assert found.line == 4 + most + 1 and f"3,000 {kind}" in found.message
    assert f"at most {most}" in str(found.remedy)


def numbers(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        kinds = schema.get("type")
        if {"integer", "number"} & set(kinds if isinstance(kinds, list) else [kinds]):
            yield path, schema
        for key, each in schema.items():
            yield from numbers(each, f"{path}/{key}")
    elif isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from numbers(each, f"{path}/{index}")


@pytest.mark.parametrize("fields", [EvaluateFields, GenerateFields, LoraFields, RemoteFields, VerifyFields])
def test_every_number_of_the_schema_has_an_end_to_either_side(fields: Any) -> None:
    for path, schema in numbers(fields.model_json_schema(), fields.__name__):
        assert {"minimum", "exclusiveMinimum"} & set(schema), path
        assert {"maximum", "exclusiveMaximum"} & set(schema), path


def test_the_schema_for_editors_has_the_same_bounds() -> None:
    schema = json.loads((Path(__file__).parents[2] / "sdflow.schema.json").read_text(encoding="utf-8"))
    named = schema["properties"]
    assert named["controlnets"]["anyOf"][0]["maxProperties"] == 16
    assert named["ip_adapters"]["anyOf"][0]["maxItems"] == 16
    assert schema["$defs"]["loras"]["maxItems"] == 100
