"""What `/openapi.json` says: of every request and every answer an example, and errors as they come. Nothing is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from serve.test_guard import ask

import sdflow.serve
from sdflow.serve.api_error import CODES
from sdflow.serve.http.api_document import ONE_PIXEL
from sdflow.serve.http.uploads import read_base64
from sdflow.serve.keys import Access, Keys
from sdflow.serve.limits import Limits

PAGE = Path(sdflow.serve.__file__).parent / "page"


@pytest.fixture(scope="module")
def told() -> Any:
    return ask(Access(), "/openapi.json").json()


def operations(told: Any) -> Iterator[tuple[str, Any]]:
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_every_answer_has_an_example_and_errors_have_openais_form(told: Any) -> None:
    for name, operation in operations(told):
        assert operation["summary"] and operation["tags"], name
        for status, answer in operation["responses"].items():
            (example, *_) = (each["example"] for each in answer["content"].values())
            if status.startswith("2"):
                continue
            if "/sdapi/" in name or "/controlnet/" in name:
                assert example.keys() == {"error", "detail", "body", "errors"}, name
            else:
                assert example["error"].keys() == {"message", "type", "param", "code"} and example["error"]["code"], (
                    name
                )
        assert "422" not in operation["responses"], f"{name}: that status is never sent"


def test_operations_have_stable_names(told: Any) -> None:
    """OpenAI's own, and for all others their method and path."""
    names = {name: operation["operationId"] for name, operation in operations(told)}
    assert len(set(names.values())) == len(names)
    assert names["post /v1/images/generations"] == "createImage"
    assert names["post /v1/images/edits"] == "createImageEdit"
    assert names["post /v1/images/variations"] == "createImageVariation"
    assert (names["get /v1/models"], names["get /v1/models/{name}"]) == ("listModels", "retrieveModel")
    assert names["delete /v1/loras/{name}"] == "delete_v1_loras_name"
    assert names["get /sdapi/v1/sd-models"] == "get_sdapi_v1_sd_models"


def test_the_manual_lists_every_code_and_status(told: Any) -> None:
    manual = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    source = "".join(path.read_text() for path in (PAGE.parent).rglob("*.py"))
    codes = {*re.findall(r'code="(\w+)"', source), *re.findall(r'_refusal\("(\w+)"', source), *CODES.values()}
    assert {code for code in codes if f"`{code}`" not in manual} == set()
    statuses = {status for _, operation in operations(told) for status in operation["responses"]}
    assert {status for status in statuses if not status.startswith("2") and f"| {status} |" not in manual} == set()


def test_every_body_has_an_example_that_its_own_schema_takes(told: Any) -> None:
    for name, operation in operations(told):
        for kind, content in operation.get("requestBody", {}).get("content", {}).items():
            schema = content["schema"]
            schema = told["components"]["schemas"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
            for example in schema["examples"]:
                files = {each for each, field in schema["properties"].items() if field.get("format") == "binary"}
                given = {**example, **(dict.fromkeys(files, "a file") if kind.startswith("multipart") else {})}
                whole = {**schema, "components": told["components"]}
                assert not list(Draft202012Validator(whole).iter_errors(given)), name
                assert given.keys() <= schema["properties"].keys(), f"{name}: it shows fields that are none"


def test_the_image_of_the_examples_is_one() -> None:
    assert read_base64(ONE_PIXEL, "image", Limits()).size == (1, 1)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_no_key_and_nothing_from_elsewhere(path: str) -> None:
    """Neither it nor what it names; what it asks for then needs the key."""
    access = Access(Keys(("secret",)))
    wanted, seen = [path], set[str]()
    while wanted:
        place = wanted.pop()
        seen.add(place)
        answer = ask(access, place)
        assert answer.status_code == 200, place
        assert not re.findall(r"""(?:src|href|from|import|url\()\s*=?\s*["'(]?(?:https?:)?//""", answer.text), place
        names = re.findall(r"""(?:from "\./|="page/)([a-z_]+\.[a-z]+)""", answer.text)
        named = {f"/page/{name}" for name in names}
        wanted += named - seen - set(wanted)
    assert {f"/page/{each.name}" for each in PAGE.iterdir() if each.suffix == ".css"} <= seen
    assert ask(access, "/openapi.json").status_code == 401
