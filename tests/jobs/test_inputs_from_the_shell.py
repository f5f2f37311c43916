"""What the commands say of inputs that are none: in words, at once, with the status of a wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sdflow.config import load_workflow
from sdflow.disk.atomic_write import require_makable
from sdflow.errors import MOST_PROBLEMS, CheckpointError, SdflowError, UsageError, WorkflowError
from sdflow.inspection.contents import read_contents
from sdflow.passes.registry import catalog
from sdflow.printable import printable
from sdflow.run.init import InitRequest, write_workflow
from sdflow.run.sign import check_signature, sign_pipeline
from sdflow.run.structures import import_structures
from sdflow.runtime.denoiser.start import MOST_PIXELS, require_size
from sdflow.runtime.draw_request import read_prompts
from sdflow.runtime.files.image_files import open_image
from sdflow.serve.keys import read_keys
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.sources.checkpoint import LONGEST_NAME, listing
from sdflow.sources.loras.lora import find_lora
from sdflow.store import Cache
from sdflow.store.signing import Signer, make_key
from tests.support.small_lora import write_lora
from tests.verify.described_folder import opened

ROOT = Path(__file__).parents[2]
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
    assert "standard input is not a terminal\n  Add --yes." in done.stderr


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


@pytest.mark.parametrize("kind", [SdflowError, UsageError, CheckpointError])
def test_a_message_is_of_bounded_length_whatever_it_quotes(kind: type[SdflowError]) -> None:
    told = str(kind("what " + "y" * 10_000, where="w" * 10_000, remedy="r" * 10_000))
    assert "what yyy" in told
    assert len(told) < 4100
    assert str(kind("what", where="here", remedy="Do it.")) == "here: what\n  Do it."


def test_of_many_problems_some_are_told_and_the_others_counted(tmp_path: Path) -> None:
    keys = "".join(f"key_{index}: 1\n" for index in range(MOST_PROBLEMS + 100))
    (tmp_path / "a.yaml").write_text(f"model: synthetic:sd15-tiny\ntarget: cpu\n{keys}")
    found = problems(tmp_path / "a.yaml")
    assert len(found.problems) >= MOST_PROBLEMS + 100
    assert f"and {len(found.problems) - MOST_PROBLEMS} more" in str(found)
    assert str(found).count("a.yaml:") == MOST_PROBLEMS


@pytest.mark.skipif(os.name == "nt", reason="there are none")
def test_nothing_that_a_command_names_is_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes into, in place of an image, a key, an archive."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    taken: tuple[Callable[[], object], ...] = (
        lambda: open_image(pipe),
        lambda: read_keys(pipe),
        lambda: import_structures(pipe, Cache(tmp_path / "cache")),
        lambda: sign_pipeline(pipe, tmp_path / "x.sig", Signer(None)),
        lambda: check_signature(tmp_path, pipe, [make_key(tmp_path / "key.pem")]),
        lambda: read_prompts(pipe),
        lambda: write_workflow(InitRequest(out=pipe, force=True, model="synthetic:sd15-tiny")),
        lambda: read_contents(pipe),
        lambda: find_lora(str(pipe), None, download=False),
        lambda: open_checkpoint(str(pipe), digests=PlainDigests(), download=False),
        lambda: opened("synthetic:sd15-tiny", components={"vae": str(pipe)}),
    )
    for read in taken:
        with pytest.raises(
            (UsageError, CheckpointError), match="a pipe, a socket or a device|not a regular file|no such signature"
        ):
            read()


def test_what_others_wrote_moves_no_terminals_cursor() -> None:
    told = str(CheckpointError("tensor \x1b[2J\x07", where="a\udcffb", remedy="\u202eabc"))
    assert told == "a\\udcffb: tensor \\x1b[2J\\x07\n  \\u202eabc"
    written = "日本語\u3000\U0001f468\u200d\U0001f469 é\t\n"
    assert printable(written) == written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("schema > /dev/full", 2, "error: standard output cannot be written: No space left on device"),
        ("--version > /dev/full", 2, "error: standard output cannot be written: No space left on device"),
        ("passes >&- <&-", 0, ""),
        ("validate nothing.yaml 2>&-", 2, ""),
    ],
)
def test_standard_streams_that_are_full_or_closed(tmp_path: Path, command: str, status: int, says: str) -> None:
    run = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m sdflow {command}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr.strip()) == (status, says)


def test_of_an_image_only_pixels_are_read(tmp_path: Path) -> None:
    """Pillow would run Ghostscript for the one; of the other it would raise what no image raises."""
    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0dIHDR" + b"\xff" * 30)
    for name in ("a.png", "b.png"):
        with pytest.raises(UsageError, match=f"{name}: cannot be read as an image"):
            open_image(tmp_path / name)
