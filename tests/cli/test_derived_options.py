"""The settings of a drawing are declared once: the options of commands and the fields of requests are derived from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from sdflow.cli.app import app
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.settings import ALL, COMMON, SERVED, Settings
from sdflow.parameter import Parameter, numbers, pair
from sdflow.runtime.draw_request import PARAMETERS, GenerateRequest
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import Edit, Generation
from sdflow.serve.http.requested import jobs_of
from sdflow.serve.http.served_model import ServedModel, read_served
from sdflow.serve.limits import Limits

DEFAULTS = {
    "--prompt": None, "--prompts": None, "--json": False, "--interactive": False, "--negative-prompt": None,
    "--prompt-syntax": "plain", "--clip-skip": None, "--reuse": None, "--guidance-interval": None, "--steps": None,
    "--guidance-scale": None, "--strength": None, "--eta": None, "--scheduler": None, "--seed": None, "--height": None,
    "--width": None, "--mask-blur": 0.0, "--whole": False, "--guess-mode": False, "--refiner-start": None,
    "--out": Path("images"), "--images": 1, "--image": None, "--mask": None, "--control": None, "--ip-image": None,
    "--embedding": None, "--allow-pickle": False, "--refiner": None, "--safety-checker": True, "--preview": False,
    "--preview-with": None, "--sheet": True, "--batch": 1, "--target": None, "--low-memory": False, "--vae-tiles": None,
    "--threads": None, "--check": True, "--prompt-2": None, "--negative-prompt-2": None, "--prompt-3": None,
    "--negative-prompt-3": None, "--max-sequence-length": None, "--original-size": None, "--crop": None,
    "--target-size": None, "--aesthetic-score": None, "--negative-aesthetic-score": None,
}  # fmt: skip
"""The options of `sdflow generate` that scripts rely on."""


def options(command: str) -> dict[str, Any]:
    """The defaults of a command's options."""
    group: Any = typer.main.get_command(app)
    parameters = [each for each in group.commands[command].params if each.opts[0].startswith("-")]
    return {next(name for name in each.opts if name.startswith("--")): each.default for each in parameters}


def test_generate_keeps_its_options_and_defaults() -> None:
    found = options("generate")
    assert {name: found.get(name, "missing") for name in DEFAULTS} == DEFAULTS


def test_every_argument_of_every_family_is_an_option_and_a_field() -> None:
    for family in FAMILIES.values():
        for name, parameter in family.arguments.items():
            assert parameter.about and parameter.kind is not None, name
            assert parameter.option(name) in options("generate") and parameter.option(name) in options("query")
            assert name in Generation.model_fields and name in Edit.model_fields
            assert family.title in ALL[name].about


def test_a_setting_that_needs_an_image_is_a_field_of_edits_alone() -> None:
    for name, parameter in SERVED.items():
        assert (name in Generation.model_fields) == (parameter.needs is None), name
        assert name in Edit.model_fields


def test_limits_are_those_of_the_fields_too() -> None:
    for name, parameter in COMMON.items():
        beyond = None if parameter.most is None else parameter.most + 1
        if parameter.served and beyond is not None:
            with pytest.raises(ValueError, match=name):
                Edit(prompt="a", **{name: beyond})
        if beyond is not None:
            with pytest.raises(UsageError, match="at most") as refused:
                parameter.require(name, beyond if parameter.kind is float else int(beyond))
            assert refused.value.where == name


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        (Parameter("", float, above=0, most=1), (1, 0.5, None), (0, 1.5, float("nan"), True, "1")),
        (Parameter("", int, least=1), (1, 7), (0, 1.0, False)),
        (Parameter("", tuple[int, int], least=1), ((1, 2), [3, 4]), ((0, 1), (1,), 1, "1x1")),
        (Parameter("", list[int], least=0), ([], [7, 8]), ([-1], [0.5], "7")),
        (COMMON["prompt_syntax"], ("plain", "a1111"), ("a111",)),
        (PARAMETERS["image"], (Path("a.png"),), ("a.png",)),
    ],
)
def test_a_value_is_of_its_kind_and_within_its_limits(parameter: Parameter, good: Any, bad: Any) -> None:
    for value in good:
        parameter.require("it", value)
    for value in bad:
        with pytest.raises(UsageError):
            parameter.require("it", value)


def test_texts_of_options_are_read() -> None:
    assert (pair("1024x768"), numbers("7,8,9")) == ((1024, 768), [7, 8, 9])
    for read, text in ((pair, "1024"), (pair, "axb"), (numbers, "7,"), (numbers, "a")):
        with pytest.raises(ValueError, match="is not of the form"):
            read(text)


def test_a_call_gets_what_is_not_the_default_under_its_own_names() -> None:
    request = GenerateRequest(Path("a"), ["b"], steps=3, seed=7, scheduler="euler", whole=True, more={"prompt_2": "c"})
    assert request.call_arguments() == {"num_inference_steps": 3, "whole": True, "prompt_2": "c"}
    assert request.recorded() == {"negative_prompt": None, "steps": 3, "whole": True, "prompt_2": "c"}
    assert Settings().call_arguments() == {}


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path) -> ServedModel:
    return read_served(tiny_pipeline, check=False)


def test_a_request_takes_the_arguments_of_its_pipelines_family_alone(model: ServedModel) -> None:
    given = {"prompt_3": "ink", "max_sequence_length": 77, "original_size": "512x768"}
    third = replace(model, arguments=tuple(given))
    fields = Generation(prompt="a", **given)
    (job,) = jobs_of(fields, third, Limits(), None, None, None)
    assert job.arguments == {"prompt_3": "ink", "max_sequence_length": 77, "original_size": (512, 768)}
    with pytest.raises(ApiError, match="does not support prompt_3") as refused:
        jobs_of(Generation(prompt="a", prompt_3="ink"), model, Limits(), None, None, None)
    assert refused.value.param == "prompt_3"
