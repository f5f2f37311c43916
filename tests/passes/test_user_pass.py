"""Passes of the user's own, loaded by path."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.config.catalog import PassNotFound
from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.registry import describe, find_pass
from sdflow.passes.user_pass import user_script_files

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
