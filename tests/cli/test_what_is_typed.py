"""What a user types and is answered: names of shipped workflows, wrong names, and what is given in a workflow's place."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sdflow.cli.app import app
from sdflow.config.nodes import parse
from sdflow.config.problems import Problems
from sdflow.errors import SdflowError, WorkflowError

Command = Callable[..., subprocess.CompletedProcess[str]]
MANIFEST = '{"format_version": 1}'


def failure(*arguments: str) -> str:
    """What a command says that fails for its arguments, here: no process is started for it."""
    with pytest.raises(SdflowError) as raised:
        app(list(arguments), prog_name="sdflow", standalone_mode=False)
    assert raised.value.exit_code == 2
    return str(raised.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: two workflows, a LoRA under two names, a folder in diffusers' layout, a built pipeline by its manifest."""
    for name in ("m9.yaml", "ind.yaml", "otter_ink.yaml"):
        (tmp_path / name).write_text("extends: base/shapes.yaml\n")
    lora = (Path(__file__).parents[2] / "samples/loras/stripes.safetensors").read_bytes()
    (tmp_path / "ink.safetensors").write_bytes(lora)
    (tmp_path / "ink").write_bytes(lora)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_index.json").write_text("{}")
    (tmp_path / "pipelines/dream").mkdir(parents=True)
    (tmp_path / "pipelines/dream/sdflow.json").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("sd15", "--target", "cuda", "--set", "model=synthetic:sd15-tiny"), ["sd15-cuda"]),
        (("shapes",), ["shapes"]),
        (("base/sdxl", "--target", "directml", "--set", "model=synthetic:sdxl-tiny"), ["sdxl-directml"]),
    ],
)
def test_a_shipped_workflow_is_given_by_its_name(
    sdflow: Command, place: Path, arguments: tuple[str, ...], names: list[str]
) -> None:
    valid = sdflow("validate", *arguments, "--json", folder=place)
    assert json.loads(valid.stdout)["valid"] == [{"workflow": arguments[0], "pipelines": names}], valid.stderr


def test_a_shipped_workflow_is_planned_and_explained_by_its_name(sdflow: Command, place: Path) -> None:
    planned = sdflow("plan", "shapes", "--json", folder=place)
    assert {step["step"].split("/")[0] for step in json.loads(planned.stdout)["steps"]} == {"shapes"}, planned.stderr
    explained = sdflow("explain", "shapes", folder=place)
    assert explained.stdout.startswith("shapes/text_encoder/0 OnnxConversion"), explained.stderr


def test_a_file_of_the_same_name_comes_first(sdflow: Command, place: Path) -> None:
    (place / "sd15").write_text("extends: base/shapes.yaml\nname: mine\n")
    done = sdflow("validate", "sd15", folder=place)
    assert done.stdout == "sd15: valid (mine)\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("validate", "sd15.yaml"), "did you mean 'sd15', which ships with sdflow?"),
        (("validate", "sdxx"), "did you mean 'sdxl"),
        (("validate", "oter_ink.yaml"), "did you mean 'otter_ink.yaml'?"),
        (("validate", "workflows/sd15_cuda.yaml"), "there is no folder 'workflows' either; 'sd15"),
        (("run", "ink.safetensors"), "Write a workflow for it: sdflow init --model ink.safetensors"),
        (("plan", "ink"), "Write a workflow for it: sdflow init --model ink"),
        (("run", "model"), "Write a workflow for it: sdflow init --model model"),
        (("run", "pipelines/dream"), "Generate with it: sdflow generate pipelines/dream --prompt"),
        (("run", "owner/name"), "Write a workflow for it: sdflow init --model hf:owner/name"),
        (("run", "hf:owner/name"), "Write a workflow for it: sdflow init --model hf:owner/name"),
        (("init", "--model", "owner/name"), "Write --model hf:owner/name for the repository on the hub."),
        (("generate", "dream", "-p", "x"), "Did you mean pipelines/dream?"),
        (("generate", "pipelines/draem", "-p", "x"), "Did you mean pipelines/dream?"),
        (("bench", "dream"), "Did you mean pipelines/dream?"),
        (("build", "x.yaml"), "Did you mean sdflow run?"),
        (("buidl",), "Did you mean sdflow run?"),
        (("rnu",), "Did you mean sdflow run?"),
        (("draw",), "Did you mean sdflow generate?"),
        (("test",), "Did you mean sdflow selftest?"),
        (("list",), "Did you mean sdflow cache ls?"),
        (("cache", "list"), "Did you mean sdflow cache ls?"),
        (("m9.yaml",), "Did you mean sdflow run m9.yaml?"),
        (("xyzzy",), "See sdflow --help."),
    ],
)
def test_what_is_wrong_is_answered_with_what_was_meant(place: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in failure(*arguments)


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_repository_in_place_of_a_path_is_to_be_written_with_hf(place: Path, command: str) -> None:
    said = failure(command, "shapes", "--set", "model=runwayml/stable-diffusion-v1-5")
    assert "write hf:runwayml/stable-diffusion-v1-5 for the repository on the hub" in said


def test_names_that_are_not_alike_are_not_offered_nor_is_a_name_itself(place: Path) -> None:
    assert failure("plan", "nope.yaml") == "nope.yaml: there is no such file"
    (place / "gone.yaml").symlink_to(place / "nothing")
    assert failure("plan", "gone.yaml") == "gone.yaml: there is no such file"


@pytest.mark.parametrize(
    ("arguments", "where", "what"),
    [
        (("run", "nope.yaml"), "nope.yaml", "there is no such file"),
        (("plan", "sd15"), r".*sd15.yaml:\d+:1", "no `target`"),
        (("generate", "dream", "-p", "x"), "dream/sdflow.json", "not an sdflow pipeline: there is no such folder"),
        (("cache", "gc", "--max-size", "ten"), "--max-size", "'ten' is not a size"),
        (("inspect", "sample:nope"), "sample:nope", "there is no sample 'nope'"),
        (("run",), ".*sdflow run", "missing argument 'WORKFLOW'"),
        (("run", "shapes", "--nothing"), ".*sdflow run", "no such option: --nothing.*"),
        (("build",), "sdflow", "there is no command 'build'"),
    ],
)
def test_with_json_a_failure_is_one_document(
    sdflow: Command, place: Path, arguments: tuple[str, ...], where: str, what: str
) -> None:
    done = sdflow(*arguments, "--json", folder=place)
    said = json.loads(done.stdout)
    assert (said["format_version"], said["kind"]) == (1, "error")
    assert said["exit_status"] == done.returncode == 2
    assert re.fullmatch(where, said["where"]) and re.fullmatch(what, said["what"])
    assert "remedy" in said and done.stderr


def test_with_json_a_failure_that_has_a_document_of_its_own_is_that_one(sdflow: Command, place: Path) -> None:
    (place / "wrong.yaml").write_text("extends: base/shapes.yaml\nfoo: 1\ntargte: cpu\n")
    done = sdflow("validate", "wrong.yaml", "--json", folder=place)
    assert done.returncode == 2 and json.loads(done.stdout)["kind"] == "validation"
    done = sdflow("plan", "wrong.yaml", "--json", folder=place)
    said = json.loads(done.stdout)
    assert [each["line"] for each in said["problems"]] == [2, 3] and said["where"] == "wrong.yaml:2:1"


def test_with_json_an_option_without_its_value_is_one_document(sdflow: Command, place: Path) -> None:
    done = sdflow("cache", "gc", "--json", "--older-than", folder=place)
    said = json.loads(done.stdout)
    assert said["where"].endswith("sdflow cache gc") and said["exit_status"] == done.returncode == 2
    assert said["what"] == "option '--older-than' requires an argument" and "error: " in done.stderr


def test_a_sample_is_inspected_by_its_name(sdflow: Command, place: Path) -> None:
    done = sdflow("inspect", "sample:shapes-klein", folder=place)
    assert done.returncode == 0 and "FLUX.2-klein" in done.stdout, done.stderr


JARGON = ("mapping", "block", "flow", "scalar", "token", "expected", "indicator", "stream", "context", "node")


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("extends: a.yaml\n  model: x\n", "2:8", "this line is indented deeper than line 1, which already has a value"),
        (
            "submodels:\n    unet: 1\n   vae: 2\n",
            "3:4",
            "this line is indented by 3 spaces, like none of the keys above",
        ),
        (
            "loras:\n  - {file: a}\n  scale: 1\n",
            "3:3",
            "like an item of the list that begins in line 2, but is not one",
        ),
        ("model: a\ntarget\nname: b\n", "2:1", "'target' has no ':' after it"),
        ("model:a\ntarget: cpu\n", "2:7", "line 1 has no space after 'model:'"),
        ('model: "abc\ntarget: cpu\n', "1:8", "the quote that opens here is not closed"),
        ("model: 'abc\ntarget: cpu\n", "1:8", "the quote that opens here is not closed"),
        ("loras: [a, b\ntarget: cpu\n", "2:7", "the '[' of line 1 is not closed before this"),
        ("loras: {a: b\ntarget: cpu\n", "2:7", "the '{' of line 1 is not closed before this"),
        ("loras: [{a: b]\ntarget: cpu\n", "1:14", "']' where '}' closes what '{' opened"),
        ("loras: [a]]\n", "1:11", "']' closes nothing"),
        ("loras: [a,,b]\n", "1:11", "a value is missing here"),
        ('model: "C:\\models\\x.safetensors"\n', "1:11", "a backslash in double quotes begins an escape"),
        ('model: "C:\\Users\\x.safetensors"\n', "1:13", "a backslash in double quotes begins an escape"),
        ("prompt: a horse: red\n", "1:16", "a second ': ' in this line"),
        ("prompt: @me\n", "1:9", "text cannot begin with '@'"),
        ("prompt: **bold**\n", "1:10", "text cannot begin with '*' or '&'"),
        ("model: - a\n", "1:8", "a list cannot begin on the line of its key"),
        ('prompt: "a" b\n', "1:13", "text after a complete value"),
        ("model: x\n- a\n", "2:1", "an item of a list where a key should be"),
        ("a:\n\tb: 1\n", "2:1", "a tab, where YAML takes only spaces"),
    ],
)
def test_wrong_yaml_is_explained_without_the_words_of_its_parser(text: str, place: str, says: str) -> None:
    problems = Problems()
    assert parse(text, "w.yaml", problems) is None
    with pytest.raises(WorkflowError) as raised:
        problems.check()
    (found,) = raised.value.problems
    assert (f"{found.line}:{found.column}", says in found.message) == (place, True), found
    assert found.remedy
    assert not [word for word in JARGON if word in f"{found.message} {found.remedy}"]
