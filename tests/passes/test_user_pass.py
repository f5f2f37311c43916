"""Passes of the user's own, loaded by path."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.config.catalog import PassNotFound
from sdflow.errors import PassError
from sdflow.passes import script_worker
from sdflow.passes.base import PassInputs
from sdflow.passes.outcome import require_model
from sdflow.passes.registry import catalog, describe, find_pass
from sdflow.passes.user_pass import user_script_files
from sdflow.passes.worker import run_pass

ROOT = Path(__file__).parents[2]
STATIC_SHAPES = "user_scripts/static_shapes.py"

SCRIPT = """\
from sdflow.passes.base import Pass, PassConfig
import beside

class First(Pass[PassConfig]):
    name = "First"
    version = 1
    Config = PassConfig
    def run(self, inputs, out, config):
        return {"said": beside.WORD}

class Unfinished(Pass[PassConfig]):
    name = "Unfinished"
    version = 1
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WORD = 'hello'\n")
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path


def test_the_shipped_example_makes_axes_static(tiny_unet: Any, tmp_path: Path, run_onnx: Any) -> None:
    found = find_pass(STATIC_SHAPES, ROOT)
    config = found.Config(sizes={"batch": 2, "latent_height": 8, "latent_width": 8})
    facts = found().run(PassInputs("unet", tiny_unet.path, {}), tmp_path, config)
    assert facts["fixed_axes"] == ["batch", "latent_height", "latent_width"]
    graph = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False).graph
    assert [axis.dim_value for axis in graph.input[0].type.tensor_type.shape.dim] == [2, 4, 8, 8]
    assert np.array_equal(run_onnx(tmp_path, tiny_unet.feeds), run_onnx(tiny_unet.path, tiny_unet.feeds))


def test_the_shipped_example_refuses_an_axis_that_is_not_there(tiny_linear: Any, tmp_path: Path) -> None:
    found = find_pass(STATIC_SHAPES, ROOT)
    with pytest.raises(PassError, match="no axis latent_height"):
        found().run(PassInputs("unet", tiny_linear.path, {}), tmp_path, found.Config(sizes={"latent_height": 8}))


def test_a_class_is_found_by_its_name_with_a_module_beside_it(script: Path) -> None:
    found = find_pass("mine.py:First", script)
    assert found().run(PassInputs("unet", None, {}), script, found.Config()) == {"said": "hello"}
    assert describe("mine.py:First", script).origin == "mine.py"


def test_the_files_of_a_script_are_those_it_is_made_of(script: Path) -> None:
    (script / "unrelated.py").write_text("")
    assert [path.name for path in user_script_files("mine.py:First", script)] == ["beside.py", "mine.py"]


def test_a_changed_script_is_loaded_anew(script: Path) -> None:
    assert find_pass("mine.py:First", script).version == 1
    (script / "mine.py").write_text(SCRIPT.replace("version = 1", "version = 2"))
    assert find_pass("mine.py:First", script).version == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine.py", "2 passes in this file: First, Unfinished"),
        ("mine.py:Second", "no pass 'Second'.*\n.*First, Unfinished"),
        ("mine.py:Unfinished", r"mine.py:11: Unfinished lacks Config"),
    ],
)
def test_which_pass_is_meant_must_be_clear_and_complete(script: Path, name: str, reason: str) -> None:
    with pytest.raises(PassNotFound, match=reason):
        find_pass(name, script)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\ny = x / 0\n", r"bad.py:2: ZeroDivisionError"),
        ("x = 1\n\ndef broken(:\n", r"bad.py:3: SyntaxError"),
        ("import no_such_module_anywhere\n", r"bad.py:1: ModuleNotFoundError"),
        ("x = 1\n", "none derives from"),
    ],
)
def test_an_error_in_a_script_is_told_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(PassNotFound, match=reason):
        find_pass("bad.py", tmp_path)


HEAD = "from sdflow.passes.base import Pass, PassConfig\n"
CLASS = (
    HEAD
    + """
class Mine(Pass[PassConfig]):
    name = "Mine"
    version = 1
    Config = PassConfig
    def run(self, inputs, out, config):
        return {}
"""
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe = 1\n", "mine.py"),
        (b"# \xe9\n", "mine.py"),
        (b"a = 1\0\n", "mine.py"),
        (b"import sys\nsys.exit(0)\n", "SystemExit: 0 when it is imported"),
        (b"raise BaseException('so')\n", "so"),
        (b"class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n", "mine.py"),
        (CLASS.replace("version = 1", "version = '1'").encode(), "Mine.version is '1', not a whole number"),
        (CLASS.replace('name = "Mine"', "name = 5").encode(), "Mine.name is 5, not text"),
        (CLASS.replace("Config = PassConfig", "Config = 5").encode(), "Config does not derive"),
        (CLASS.replace("version = 1", "version = 1\n    accepts = 'all'").encode(), "accepts is 'all'"),
        (CLASS.replace("version = 1", "version = 1\n    uses = 'onnx'").encode(), "uses is 'onnx'"),
        (
            (CLASS + "Mine = type('Mine', (Mine,), {'__module__': __name__, 'version': None})").encode(),
            "version is None",
        ),
    ],
)
def test_a_faulty_script_is_told_in_words(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(PassNotFound, match=re.escape(says)):
        find_pass("mine.py:Mine", tmp_path)
        user_script_files("mine.py:Mine", tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000 + ".py", "a\0b.py", "/dev/zero/x.py", "pipe.py"])
def test_a_path_that_is_no_script_is_told(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(PassNotFound, match="there is no such script") as raised:
        find_pass(name, tmp_path)
    assert len(str(raised.value)) < 1000


def test_options_that_cannot_be_described_are_told(tmp_path: Path) -> None:
    options = (
        "from pydantic import Field\nclass Options(PassConfig):\n    a: int = Field(default_factory=lambda: 1 // 0)\n"
    )
    (tmp_path / "mine.py").write_text(
        CLASS.replace("class Mine", f"{options}class Mine").replace("= PassConfig", "= Options")
    )
    with pytest.raises(PassNotFound, match="its options cannot be described: ZeroDivisionError"):
        describe("mine.py", tmp_path)


WRITES = """\
from pathlib import Path
from sdflow.passes.base import Pass, PassConfig

class Mine(Pass[PassConfig]):
    name = "Mine"
    version = 1
    Config = PassConfig
    def run(self, inputs, out, config):
        {body}
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "import sys\nsys.exit(0)\n",
            r"mine.py:2: SystemExit: 0 when it is imported\n.*\n  \| .*mine.py:2 in <module>: sys",
        ),
        ("import os\nos._exit(0)\n", r"mine.py: when it is imported, the process ended with status 0 and no result"),
        (
            "import os, signal\nos.kill(os.getpid(), 9)\n",
            r"mine.py: when it is imported, the process was killed by SIGKILL",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd\n",
            r"mine.py:3: Odd when it is imported",
        ),
        pytest.param(
            "filled = [bytes(1 << 30) for _ in range(1 << 30)]\n",
            r"mine.py:1: MemoryError when it is imported",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="no limit is held there"),
        ),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_script_is_read_in_a_process_of_its_own(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(PassNotFound, match=says):
        catalog().find("mine.py", tmp_path)


def test_a_script_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("while True: pass\n")
    monkeypatch.setattr(script_worker, "SECONDS", 2.0)
    with pytest.raises(PassNotFound, match="mine.py: was not imported within 2 s"):
        catalog().find("mine.py", tmp_path)


def test_what_a_script_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("print('{}')\n" + WRITES.format(body="pass"))
    assert catalog().find("mine.py", tmp_path).accepts == "onnx"
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "{}\n")


def ran(folder: Path, body: str, model: Path | None = None) -> Any:
    (folder / "mine.py").write_text(WRITES.format(body=body))
    (folder / "out").mkdir()
    request = {
        "pass": "mine.py", "folder": str(folder), "submodel": "unet", "model": str(model) if model else None,
        "checkpoint": {}, "family": "stable_diffusion", "loras": [], "config": {}, "out": str(folder / "out"),
    }  # fmt: skip
    facts = run_pass(request, lambda phrase: None)
    require_model(folder / "out", "mine.py")
    return facts


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('bad')", r"mine.py:9: ValueError: bad while it ran\n.*\n  \| .*mine.py:9 in run: raise"),
        ("raise SystemExit(0)", r"mine.py:9: SystemExit: 0 while it ran"),
        ("return None", r"mine.py: returned invalid facts: None is not a map"),
        ("return {'a': float('nan')}", "mine.py: returned invalid facts"),
        ("return {}", r"mine.py: wrote no model.onnx"),
        (
            "(out / 'model.onnx').write_bytes(b''); return {}",
            "mine.py: wrote a model.onnx that is not valid: it has no graph",
        ),
        (
            "(out / 'model.onnx').write_bytes(b'\\xff'); return {}",
            "mine.py: wrote a model.onnx that is not an ONNX model",
        ),
        ("(out / 'model.onnx').symlink_to('/etc/passwd'); return {}", "mine.py: wrote model.onnx as a symbolic link"),
    ],
)
def test_a_pass_that_writes_no_model_has_failed(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(PassError, match=says) as raised:
        ran(tmp_path, body)
    assert "sdflow/passes/worker.py" not in str(raised.value)


def test_a_model_that_is_not_whole_is_not_valid(tmp_path: Path, tiny_linear: Any) -> None:
    copy = "import shutil, onnx; shutil.copytree(inputs.model, out, dirs_exist_ok=True); m = onnx.load(str(out / 'model.onnx'), "
    copy += "load_external_data=False); {change}; onnx.save(m, str(out / 'model.onnx')); return {{}}"
    for index, (change, says) in enumerate({
        "m.graph.node[-1].input[0] = 'gone'": "reads gone, which no earlier node produces",
        "m.graph.output[0].name = 'gone'": "no node produces its output gone",
        "m.graph.ClearField('node')": "it has no graph",
    }.items()):  # fmt: skip
        (folder := tmp_path / str(index)).mkdir()
        with pytest.raises(PassError, match=says):
            ran(folder, copy.format(change=change), tiny_linear.path)
    (folder := tmp_path / "whole").mkdir()
    assert ran(folder, copy.format(change="pass"), tiny_linear.path) == {}
