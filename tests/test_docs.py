"""README and manual are true of the program: every command, option, file, link, message and example in them is checked."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer
import yaml
from bench.conftest import built  # noqa: F401
from sampled import sampled
from started_python import Command

from sdflow.cli.app import app
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.passes.base import PassInputs
from sdflow.passes.user_pass import load_user_pass
from sdflow.serve.metrics import Metrics

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSTALL = "python3.11 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[cpu,test]' && "

RUN_HERE = ("plan", "explain", "validate", "schema", "passes", "targets", "cache", "generate", "bench", "export")
"""These are run as they are written, in a folder where `pipelines/shapes_cpu` is a small pipeline."""
PARSED_ONLY = {
    "run": "tests/samples/test_onnx_pipeline.py, tests/jobs/test_main_job.py",
    "verify": "tests/jobs/test_main_job.py, tests/run/test_fix.py",
    "bake": "tests/jobs/test_main_job.py",
    "tune": "tests/bench/test_tune.py",
    "inspect": "tests/inspection/test_inspect.py",
    "init": "tests/run/test_init.py",
    "serve": "tests/serve/test_openai_client.py, tests/serve/test_faults.py",
    **dict.fromkeys(("deploy", "query", "status", "terminate"), "tests/serve/test_deploy.py"),
    "selftest": "tests/selftest/test_selftest.py",
    "doctor": "its status depends on the machine",
}
"""These are only parsed; the tests that run them. So are mentions in a sentence, and the fences of `sh`."""
QUICKER = {
    "generate": ("--steps", "2", "--threads", "1"),
    "bench": [
        "--batch",
        "1",
        "--size",
        "64",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--threads",
        "1",
        "-e",
        "ort-cpu",
        "--no-check",
    ],
}
"""What is put behind a command for the test's sake; the last of an option counts."""
COMPARED = {"--compare"}
"""Benches that need the result of another."""


@dataclass(frozen=True)
class Line:
    """A command in a page. whole: it stands on a line of its own, to be typed; else in a sentence, as a mention. runs: in an
    indented block, not in a fence of `sh`, whose commands need a model, hardware or a service that is not here."""

    page: Path
    number: int
    words: tuple[str, ...]
    whole: bool
    runs: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}:{self.number} {' '.join(self.words)}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)


def commands() -> Iterator[Line]:
    for page in PAGES:
        text = text_of(page)
        for fence in re.finditer(r"^ *```(?:sh|powershell)\n(.*?)^ *```", text, flags=re.M | re.S):
            lines = fence[1].replace("\\\n", " \n").splitlines()
            for number, line in enumerate(lines, text[: fence.start(1)].count("\n") + 1):
                yield from _commands(page, number, line, whole=True, runs=False)
        prose = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        for number, line in enumerate(prose.splitlines(), 1):
            if line.startswith("    "):
                yield from _commands(page, number, line, whole=True, runs=True)
            else:
                for code in re.findall(r"`([^`]+)`", line):
                    yield from _commands(page, number, code, whole=False, runs=False)


def _commands(page: Path, number: int, code: str, *, whole: bool, runs: bool) -> Iterator[Line]:
    for command in code.strip().removeprefix("run: ").split("&&"):
        if command.lstrip().startswith(("sdflow", ".venv/bin/sdflow")):
            words = shlex.split(command, comments=True)
            if words[0] in ("sdflow", ".venv/bin/sdflow") and words[1:2] not in ([], ["COMMAND"]):
                yield Line(page, number, tuple(words[1 : words.index(">") if ">" in words else None]), whole, runs)


COMMANDS = list(commands())
WHOLE = [line for line in COMMANDS if line.runs]


@cache
def group_of(whole: bool) -> Any:
    """The command line, for lines and for mentions, in which what must be given may be missing."""
    found: Any = typer.main.get_command(app)
    if not whole:
        for command in commands_of(found):
            for parameter in command.params:
                parameter.required = False
    return found


def commands_of(group: Any) -> Iterator[Any]:
    yield group
    for command in getattr(group, "commands", {}).values():
        yield from commands_of(command)


def parse(line: Line) -> None:
    """Raises click's errors for a command, an option or an argument that is not there."""
    command = group_of(line.whole)
    context = command.context_class(command, info_name="sdflow")
    rest = list(line.words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=name, parent=context)
    if "--help" in rest:
        return
    command.parse_args(context, rest)


@pytest.mark.parametrize("line", COMMANDS, ids=str)
def test_every_command_of_the_manual_is_one(line: Line) -> None:
    parse(line)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("rnu x.yaml", "there is no command"),
        ("cache list", "there is no command"),
        ("run x.yaml --sett a=1", "No such option"),
        ("bake --base a --lora b", "Missing.*out"),
        ("run", "Missing.*workflow"),
        ("tune a b", "unexpected extra argument"),
        ("generate a --steps few", "valid int"),
    ],
)
def test_what_is_no_command_is_found(words: str, says: str) -> None:
    with pytest.raises(Exception, match=says) as raised:
        parse(Line(PAGES[0], 1, tuple(words.split()), whole=True))
    assert hasattr(raised.value, "exit_code"), "an error of usage"


def test_every_command_is_in_the_manual() -> None:
    group: Any = typer.main.get_command(app)
    named = {line.words[0] for line in COMMANDS if line.page.name == "commands.md" and line.words}
    assert named == set(group.commands)
    cache = {line.words[1] for line in COMMANDS if line.page.name == "commands.md" and line.words[:1] == ("cache",)}
    assert cache == set(group.commands["cache"].commands)


def test_every_option_that_is_spoken_of_exists() -> None:
    group: Any = typer.main.get_command(app)
    all_commands = [*group.commands.values(), *group.commands["cache"].commands.values(), group]
    known = {"--help"} | {
        name for each in all_commands for option in each.params for name in (*option.opts, *option.secondary_opts)
    }
    spoken = {
        (page.name, option)
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", text_of(page))
        if not code.startswith(("python ", "ruff ", "olive ", "optimum-cli ", "mkdocs ", "pip "))
        for option in re.findall(r"(?<!\S)--[a-z][a-z0-9_-]*", code)
    }
    assert len(spoken) > 20
    assert {each for each in spoken if each[1] not in known} == set()


@pytest.fixture(scope="module")
def folder(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """As the repository's root is after its first run, with a pipeline that is smaller still."""
    made = tmp_path_factory.mktemp("manual")
    (made / "pipelines").mkdir()
    (made / "pipelines/shapes_cpu").symlink_to(built, target_is_directory=True)
    for name in ("workflows", "samples"):
        (made / name).symlink_to(ROOT / name, target_is_directory=True)
    return made


def test_commands_are_run_here_or_elsewhere() -> None:
    assert {line.words[0] for line in WHOLE} <= {*RUN_HERE, *PARSED_ONLY}
    for files in PARSED_ONLY.values():
        for name in re.findall(r"tests/\S+\.py", files):
            assert (ROOT / name).is_file()


RUN = [line for line in WHOLE if line.words[0] in RUN_HERE and COMPARED.isdisjoint(line.words)]
OPTIONS = sorted({(line.words[0], word) for line in RUN for word in line.words if word.startswith("-")})


@pytest.mark.parametrize(
    "line",
    sampled(
        RUN,
        lambda line: line.words[: 2 if line.words[0] == "cache" else 1],
        *(lambda line, option=option: line.words[0] == option[0] and option[1] in line.words for option in OPTIONS),
    ),
    ids=str,
)
def test_a_command_of_the_manual_runs(line: Line, folder: Path, sdflow: Command) -> None:
    """By default so many that each command and each of its options occurs."""
    words = [*line.words, *QUICKER.get(line.words[0], ())]
    if line.words[:2] == ("cache", "clean"):
        words.append("--yes")
    done = sdflow(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_ci_runs_the_readmes_command_for_the_tests_and_the_other_differs_in_its_end() -> None:
    installs = [line.strip() for line in text_of(ROOT / "README.md").splitlines() if line.startswith("    python3.11")]
    ends = [line.removeprefix(INSTALL) for line in installs]
    assert ends == [".venv/bin/sdflow run workflows/shapes_cpu.yaml", ".venv/bin/pytest -q"]
    assert installs[1] in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.skipif(os.name != "posix", reason="CI runs a shell script")
@pytest.mark.parametrize("fails", [None, "python3.11", "pip", "pytest", "ruff", "mypy"])
def test_ci_fails_with_any_of_its_commands_also_where_an_environment_is_there(
    fails: str | None, tmp_path: Path
) -> None:
    """Each command is a script that writes its name, and one of them fails. mypy runs beside the others."""
    names = ["python3.11", "pip", "pytest", "ruff", "mypy"]
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    for name in names:
        script = tmp_path / ("bin" if name == "python3.11" else ".venv/bin") / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\necho {name} >> {shlex.quote(str(tmp_path))}/called\nexit {int(name == fails)}\n")
        script.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", tmp_path / ".ci/run"], env={**os.environ, "PATH": path}, check=False)
    assert (done.returncode == 0) == (fails is None)
    called = list(dict.fromkeys((tmp_path / "called").read_text().split()))
    until = names.index(fails) if fails else len(names)
    assert [each for each in called if each != "mypy"] == names[:-1][: until + 1]
    assert "mypy" in called or fails not in (None, "mypy")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_are_named_are_there(page: Path) -> None:
    text = text_of(page)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for code in re.findall(r"`([^`\n]+)`", text) + [line.strip() for line in text.splitlines()]:
        for script, rest in re.findall(r"python ((?:benchmarks|samples)/\S+\.py)(.*)", code):
            source = (ROOT / script).read_text()
            assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", rest)), code
        for name in re.findall(r"^(?:workflows|sdflow|tests|benchmarks|user_scripts|samples)/[\w/.]*$", code):
            assert (ROOT / name).exists() or name == "user_scripts/my_pass.py", code


WORKFLOWS = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "block"), WORKFLOWS, ids=lambda each: getattr(each, "name", None))
def test_the_workflows_of_the_manual_are_valid(page: Path, block: str, tmp_path: Path) -> None:
    folder = tmp_path / "workflows"
    shutil.copytree(ROOT / "workflows", folder)
    models = ("models/dreamshaper.safetensors", "models/sd3.5_medium.safetensors")
    models += ("models/t5-v1_1-xxl-encoder-Q5_K_M.gguf", "models/t5xxl_fp8_e4m3fn_scaled.safetensors")
    for name in (*models, "loras/ink.safetensors", "loras/wood.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "user_scripts").mkdir()
    for name, content in scripts().items():
        (folder / "user_scripts" / name).write_text(content)
    written = yaml.safe_load(block)
    if "extends" not in written:
        block += "extends: base/sd15.yaml\ntarget: cpu\n"
    elif "target" not in written and "matrix" not in written:
        block += "target: cpu\n"
    (folder / "example.yaml").write_text(block)
    assert load_workflow(folder / "example.yaml", catalog=registry.catalog()).pipelines


def test_the_python_of_the_manual_is_python_and_imports_what_is_there() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page, "python")]
    assert found
    for page, block in found:
        compile(block, str(page), "exec")
        for module, names in re.findall(r"^from (sdflow\S*) import (.+)$", block, flags=re.MULTILINE):
            imported = __import__(module, fromlist=names.split(", "))
            assert all(hasattr(imported, name) for name in names.split(", ")), module


def scripts() -> dict[str, str]:
    """The manual's passes: file name -> content."""
    found = [block for page in PAGES for block in blocks(page, "python") if block.startswith("# user_scripts/")]
    return {block.split("\n")[0].removeprefix("# user_scripts/"): block for block in found}


def test_the_passes_of_the_manual_are_passes(tmp_path: Path) -> None:
    described = {}
    for name, block in scripts().items():
        (tmp_path / name).write_text(block)
        described[name] = registry.describe(name, tmp_path)
    assert described["my_pass.py"].summary == "Says what it does in one line."
    assert [option.name for option in described["my_pass.py"].options] == ["keep"]
    assert [option.name for option in described["merge_equal.py"].options] == ["limit"]


def test_the_pass_of_the_tutorial_leaves_a_smaller_model_of_the_same_ports(built: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "merge_equal.py").write_text(scripts()["merge_equal.py"])
    written = load_user_pass("merge_equal.py", tmp_path)()
    out = tmp_path / "out"
    out.mkdir()
    facts = written.run(PassInputs("unet", built / "unet", {}), out, written.Config())
    before, after = (
        onnx.load(str(folder / "model.onnx"), load_external_data=False) for folder in (built / "unet", out)
    )
    assert facts == {"nodes": len(after.graph.node), "merged": len(before.graph.node) - len(after.graph.node)}
    assert facts["merged"] > 0
    onnx.checker.check_model(str(out / "model.onnx"))
    assert [port.name for port in after.graph.input] == [port.name for port in before.graph.input]


MESSAGES = re.findall(r"^### `(.+)`$", text_of(ROOT / "docs/troubleshooting.md"), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text in the package, with `…` in the place of each value."""
    found = []
    for path in sorted((ROOT / "sdflow").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_the_errors_of_the_manual_are_those_of_the_program(message: str, texts: list[str]) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
    assert any(pattern.search(text) for text in texts)


def keys_of(schema: dict[str, Any]) -> Iterator[str]:
    """Names of the properties of a part of the JSON Schema, at any depth, without those of single passes."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for name, each in schema.items():
            if name != "$defs":
                yield from keys_of(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from keys_of(each)


def test_the_reference_names_every_key_of_a_workflow_and_every_metric_and_variable() -> None:
    schema = json.loads((ROOT / "sdflow.schema.json").read_text())
    fields = {
        name: each for name, each in schema["$defs"].items() if name.split(".")[0] in ("evaluate", "generate", "cache")
    }
    named = set(re.findall(r"[a-z0-9_]+", text_of(ROOT / "docs/reference/workflow.md")))
    shared = set(re.findall(r"[a-z_]+", text_of(ROOT / "docs/shared_cache.md")))
    assert {*keys_of(schema), *(key for each in fields.values() for key in keys_of(each))} - named - shared == set()
    metrics = {each.name for each in Metrics().registry.collect()}
    told = set(re.findall(r"`(sdflow_[a-z_]+?)(?:_total)?`", text_of(ROOT / "docs/reference/metrics.md")))
    assert metrics == told
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "sdflow").rglob("*.py"))
    variables = set(re.findall(r"SDFLOW_[A-Z_]+[A-Z]", source)) - {"SDFLOW_ORT_H"}  # a macro of C
    assert variables <= set(re.findall(r"SDFLOW_[A-Z_]+[A-Z]", text_of(ROOT / "docs/reference/environment.md")))
