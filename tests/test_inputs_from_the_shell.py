"""What the commands say of inputs that are none: in words, at once, with the status of a wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdflow.atomic_write import require_makable
from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, UsageError, WorkflowError
from sdflow.inspection.contents import read_contents
from sdflow.passes.registry import catalog
from sdflow.runtime.start import MOST_PIXELS, require_size
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.sources.checkpoint import LONGEST_NAME, listing
from tests.small_lora import write_lora

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(60)


def sdflow(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sdflow", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def problems(path: Path) -> WorkflowError:
    with pytest.raises(WorkflowError) as raised:
        load_workflow(path, catalog=catalog())
    return raised.value


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model: synthetic:sd15-tiny\n\ttarget: cpu\n", "2:1"),
        ("model: synthetic:sd15-tiny\ntarget:\n\t- cpu\n", "3:1"),
        ("\tmodel: synthetic:sd15-tiny\n", "1:1"),
    ],
)
def test_a_tab_is_called_a_tab(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert f"a.yaml:{place}: a tab, where YAML takes only spaces" in str(problems(tmp_path / "a.yaml"))


@pytest.mark.skipif(os.name == "nt", reason="there are none")
@pytest.mark.parametrize("extends", ["pipe", "/dev/zero", "."])
def test_a_workflow_extends_files_alone(tmp_path: Path, extends: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.yaml").write_text(f"extends: {extends}\n")
    assert "cannot read" in str(problems(tmp_path / "a.yaml"))
    assert "a pipe, a socket or a device" in str(problems(tmp_path / "pipe"))


@pytest.mark.parametrize("extends", ["y" * 10_000, "a\\0b", "base/" + "y" * 10_000])
def test_a_name_that_no_file_has_is_told_at_a_glance(tmp_path: Path, extends: str) -> None:
    (tmp_path / "a.yaml").write_text(f'extends: "{extends}"\n')
    assert "cannot read" in str(problems(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text(f"model: synthetic:sd15-tiny\ntarget: {extends}\n")
    assert len(str(problems(tmp_path / "a.yaml"))) < 1500


def test_a_workflow_is_validated_for_programs(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(f"extends: {ROOT / 'workflows/tiny_cpu.yaml'}\n")
    (tmp_path / "bad.yaml").write_text("model: synthetic:sd15-tiny\ntarget: cpuu\n")
    done = sdflow(tmp_path, "validate", "--json", "good.yaml", "bad.yaml")
    told = json.loads(done.stdout)
    assert (done.returncode, told["kind"], told["valid"]) == (
        2, "validation", [{"workflow": "good.yaml", "pipelines": ["good"]}],
    )  # fmt: skip
    assert {problem["file"] for problem in told["problems"]} == {"bad.yaml"}
    assert all(problem["line"] and problem["message"] for problem in told["problems"])


def test_the_cache_is_not_emptied_without_a_yes(tmp_path: Path) -> None:
    done = sdflow(tmp_path, "cache", "clean", "--cache", "there")
    assert done.returncode == 2
    assert "there is no terminal to ask\n  Write it: --yes" in done.stderr


def test_a_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "style.safetensors").rename(tmp_path / "STYLE.SAFETENSORS")
    assert read_contents(lora)
    (tmp_path / "MODEL.SAFETENSORS").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="MODEL.SAFETENSORS: not a valid safetensors file"):
        open_checkpoint(str(tmp_path / "MODEL.SAFETENSORS"), digests=PlainDigests(), download=False)


@pytest.mark.parametrize("size", [MOST_PIXELS + 8, 800_000])
def test_no_image_is_larger_than_anything_can_draw(size: int) -> None:
    for sizes in ((size, None), (None, size)):
        with pytest.raises(UsageError, match=f"is {size:,} pixels"):
            require_size(8, *sizes)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux")
def test_a_folder_that_cannot_be_made_is_known_beforehand(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        require_makable(Path("/proc/x/y"))
    require_makable(tmp_path / "a/b/c")
    assert not (tmp_path / "a").exists()


def test_a_list_of_names_is_read_at_a_glance() -> None:
    names = [f"{index}" + "x" * 10_000 for index in range(1000)]
    assert len(listing(names)) < 6 * LONGEST_NAME
    assert listing(names).endswith("and 995 more")
    assert listing(["a", "b"]) == "a, b"
