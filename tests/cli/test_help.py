"""What `--help` shows: options in groups, an example that is a command, one-liners that fit, nothing cut off."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.cli.help import PANELS, first_sentence
from sdflow.families import FAMILIES

GROUP: Any = typer.main.get_command(app)
COMMANDS = {
    **{name: each for name, each in GROUP.commands.items() if name != "cache"},
    **{f"cache {name}": each for name, each in GROUP.commands["cache"].commands.items()},
}


def shown(name: str) -> str:
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", ["", "cache", *COMMANDS])
def test_help_fits_80_columns_and_cuts_no_text(name: str) -> None:
    text = shown(name)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "..." not in text.replace("PIPELINE...", "").replace("WORKFLOW...", "").replace(
        "COMMAND [ARGS]...", ""
    ).replace("[WORKFLOW]...", "").replace("FILE_OR_FOLDER...", "").replace("N,...", "")
    assert not any(word in text for word in ("<int", "<str>", "<list", "<float", "<path>"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_described_in_at_most_60_characters_on_one_line(name: str) -> None:
    sentence = first_sentence(COMMANDS[name])
    assert 0 < len(sentence) <= 60
    above = "cache" if name.startswith("cache ") else ""
    assert sentence in shown(above), "on one line"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_understands(name: str) -> None:
    command = COMMANDS[name]
    words = shlex.split(command.epilog, comments=True)
    words = words[: words.index(">") if ">" in words else None]
    path = ["sdflow", *name.split()]
    assert words[: len(path)] == path
    command.make_context(name, words[len(path) :])
    assert f"\nExample:\n  {command.epilog}\n" in shown(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_of_a_command_with_many_is_without_a_group(name: str) -> None:
    grouped = {each for names in PANELS.values() for each in names.split()}
    options = [each.name for each in COMMANDS[name].params if each.param_type_name == "option"]
    if len(options) > 6:
        assert set(options) - grouped == set()


def test_a_group_has_no_name_that_no_command_takes() -> None:
    taken = {each.name for command in COMMANDS.values() for each in command.params}
    assert {each for names in PANELS.values() for each in names.split()} - taken == set()


@pytest.mark.parametrize("command", ["generate", "query"])
def test_an_option_of_several_families_has_the_default_of_each(command: str) -> None:
    options = {option.name: option.help for option in COMMANDS[command].params if option.param_type_name == "option"}
    for family in FAMILIES.values():
        for name, parameter in family.arguments.items():
            said = options[name]
            assert said is not None and parameter.described in said and family.title in said
    assert "FLUX.1: Tokens that T5 reads of a prompt. Default: 256 for -schnell" in str(options["max_sequence_length"])
