"""Every command at a terminal, as its user sees it: in a pseudo-terminal, its screen read by pyte.

All share what the README's first command builds, which is interrupted once and then run again, and resized. Most are forked
(`started_python`); those that a test of signals or of Python's own settings needs are new Pythons.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from kept_builds import KeptBuilds
from sampled import sampled
from started_python import StartedPython
from terminal import COLOUR, ROOT, Session, Terminal, commands
from until import until

from sdflow.cli import SECONDS_TO_END

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")

README = ("run", str(ROOT / "workflows/shapes_cpu.yaml"))
LORA = str(ROOT / "samples/loras/stripes.safetensors")
PIPELINE = "pipelines/shapes_cpu"
TINY = str(ROOT / "workflows/tiny_cpu.yaml")


@dataclass
class Built:
    """What the README's command left in a folder, and what its two runs showed."""

    terminal: Terminal
    interrupted: Session
    sound: Session
    finished: Session


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None, cache_of: KeptBuilds
) -> Built:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "tmp").mkdir()
    terminal = Terminal(folder, environment={"TMPDIR": str(folder / "tmp")}, started=started_python)
    interrupted = terminal.start(*README)
    interrupted.until_shown("unet OnnxConversion")
    interrupted.until_shown("1 of 11 steps")
    interrupted.interrupt()
    interrupted.end()
    sound = terminal.run("cache", "verify")
    finished = terminal.start(*README)
    finished.until_shown("unet OrtTransformersOptimization")
    finished.resize(100, 40)
    if finished.end() == 0:
        cache_of.offer("shapes_cpu", folder)
    return Built(terminal, interrupted, sound, finished)


@pytest.fixture
def terminal(built: Built) -> Terminal:
    return built.terminal


def well(session: Session, status: int = 0) -> Session:
    """What holds of any command at any terminal."""
    assert session.status == status, session.text
    assert "Traceback" not in session.text
    assert not session.cursor_is_hidden
    assert session.broken() == []
    return session


# The README's first command


def test_ctrl_c_ends_a_run_with_130_and_restores_the_terminal(built: Built) -> None:
    session = well(built.interrupted, 130)
    assert session.shown[-1].startswith("interrupted: nothing was left half-written")
    assert not any("⠋" <= letter <= "⠿" for letter in session.text), "nothing of the live view is left"
    assert not list((built.terminal.folder / "tmp").glob("sdflow-*"))


def test_after_ctrl_c_the_cache_is_sound(built: Built) -> None:
    assert "sound: " in well(built.sound).text


def test_the_first_command_of_the_readme_shows_its_steps_and_ends_in_the_summary(built: Built) -> None:
    session = well(built.finished)
    assert "sdflow run workflows/shapes_cpu.yaml" in (ROOT / "README.md").read_text()
    assert "shapes_cpu: sample:shapes for cpu" in session.text
    assert "shapes_cpu: verified for cpu, quick" in session.text
    assert "of 11 steps ran" in session.shown[-1]
    for name in ("text_encoder", "vae_decoder", " (of 2)", PIPELINE):
        assert name in session.text
    assert not any("⠋" <= letter <= "⠿" for letter in session.text), "nothing of the live view is left"
    report = (built.terminal.folder / "results/shapes_cpu.html").read_text()
    for shown in ("built and verified", "An image takes ", "median ms", "data:image/png;base64,", " (of 2)"):
        assert shown in report
    order = [session.text.index(each) for each in ("built in", "shapes_cpu: done in", "sample:shapes for cpu")]
    assert order == sorted(order), "the result comes below what was shown while it ran"


def test_while_a_step_runs_its_time_memory_and_phase_are_shown_in_one_line(built: Built) -> None:
    frames = [line for line in built.finished.printed if "⠋" <= line[0] <= "⠿"]
    assert any("unet OrtTransformersOptimization (2/3): " in line for line in frames)
    assert any(" MB  shapes_cpu " in line for line in frames)
    bars = [re.match(r" *(\d+) of 11 steps, ", line) for line in built.finished.printed]
    done = {int(found[1]) for found in bars if found}
    assert len(done) > 3 and done <= set(range(11))
    assert "✓ shapes_cpu unet: " in built.finished.text, "a finished submodel is a line that stays"
    assert built.finished.text.count("✓ shapes_cpu ") == 4
    assert max(map(len, frames)) <= 100
    assert max(len(line) for line in built.interrupted.printed if "⠋" <= line[0] <= "⠿") < 80


# Every command at 80 columns

SUCCEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "verify": ((PIPELINE, "--quick"), "shapes_cpu: verified for cpu, quick"),
    "bake": (("--base", PIPELINE, "--lora", f"{LORA}:0.5", "--out", "pipelines/baked"), "LoRAs in 84 weights"),
    "plan": ((*README[1:], "-v"), "11 of 11 steps are cached"),
    "explain": (README[1:], "unchanged, built"),
    "validate": (README[1:], "shapes_cpu.yaml: valid (shapes_cpu)"),
    "schema": ((), '"$schema"'),
    "passes": ((), "OrtTransformersOptimization"),
    "targets": ((), "Every target can be built here, even if it does not run here."),
    "doctor": ((), "onnxruntime"),
    "generate": ((PIPELINE, "-p", "a red circle", "--steps", "2", "--seed", "7"), "images/001-7.png"),
    "export": ((PIPELINE, "--schedule-file", "schedule.json"), "DDIMScheduler, 50 steps"),
    "bench": (("--list",), "torch.compile, max-autotune"),
    "inspect": ((LORA,), "kind"),
    "init": (("--model", "sample:shapes"), "workflow.yaml: written. Next: sdflow run workflow.yaml"),
    "status": ((), "nothing is deployed"),
    "cache ls": ((), "OrtTransformersOptimization"),
    "cache push": (("--url", "remote"), "results were new to"),
    "cache pull": (("--url", "remote"), "0 of 0 missing results fetched"),
    "cache key": (("key.pem",), ""),
    "cache verify": ((), "sound: "),
    "cache gc": (("--dry-run",), "would remove 0 entries"),
    "cache engines": ((), "kept: 0 B in "),
    "cache export": (("all.sdflow", "--structures", "own.yaml", "--no-verify"), "all.sdflow: "),
    "cache import": (("all.sdflow", "--cache", "other"), "results were new to the cache"),
    "cache clean": (("--yes", "--cache", "other"), "other is empty"),
}
COPIED = ("inspect", "schema")
"""What is to be copied from their output is wrapped by the terminal alone."""
FAILS: dict[str, tuple[tuple[str, ...], str]] = {
    "tune": ((PIPELINE, "--option", "nothing"), "no option is named nothing"),
    "selftest": (("--show", "nothing.json"), "nothing.json"),
    "query": (("nobody", "a circle"), "no such deployment"),
    "terminate": (("nobody",), "no such deployment"),
    "bake": (("--base", PIPELINE, "--lora", "nothing.safetensors", "--out", "x"), "nothing.safetensors"),
    "run": (("nothing.yaml",), "there is no such file"),
    "generate": (("nothing", "-p", "x"), "nothing"),
    "cache import": (("nothing",), "nothing: no such file"),
    "lock": (("nothing.yaml",), "there is no such file"),
    "provenance": (("nothing",), "not an sdflow pipeline"),
    "sign": (("nothing",), "nothing to sign with"),
    "push": (("oci://localhost:1/fox:1", "nothing"), "not an sdflow pipeline"),
    "pull": (("nothing",), "nothing"),
}
ELSEWHERE = {"run", "serve", "deploy"}
"""Driven by tests of their own."""


def test_every_command_is_driven_through_a_terminal() -> None:
    assert {*SUCCEEDS, *FAILS, *ELSEWHERE} == set(commands())


@pytest.mark.parametrize("command", SUCCEEDS)
def test_a_command_shows_its_result_with_no_name_broken(terminal: Terminal, command: str) -> None:
    (terminal.folder / "own.yaml").write_text(f"extends: {README[1]}\n")
    arguments, says = SUCCEEDS[command]
    session = terminal.run(*command.split(), *arguments)
    if command not in COPIED:
        assert session.broken() == []
    assert session.status == 0, session.text
    assert "Traceback" not in session.text
    assert not session.cursor_is_hidden
    assert says in session.words


@pytest.mark.parametrize("command", FAILS)
def test_an_error_is_told_in_words_and_status_2(terminal: Terminal, command: str) -> None:
    arguments, says = FAILS[command]
    session = well(terminal.run(*command.split(), *arguments), 2)
    assert session.shown[0].startswith("error: ")
    assert says in session.words


def test_the_help_of_every_command_fits_80_columns(tmp_path: Path) -> None:
    script = """
import typer
from sdflow.cli.app import app
command = typer.main.get_command(app)
for name in NAMES:
    command([*name.split(), "--help"], prog_name="sdflow", standalone_mode=False)
"""
    names = ["", *commands()]
    session = Terminal(tmp_path).start_command(sys.executable, "-c", script.replace("NAMES", repr(names)))
    well(session)
    assert session.text.count("Usage: sdflow") == len(names)
    assert max(map(len, session.printed)) <= 80


@pytest.mark.parametrize(("command", "columns"), sampled([("plan", 160), ("run", 20), ("plan", 20), ("run", 160)]))
def test_wide_and_narrow_terminals_break_no_name(terminal: Terminal, command: str, columns: int) -> None:
    more = ("--no-evaluate",) if command == "run" else ()
    session = well(replace(terminal, columns=columns).run(command, *README[1:], *more, "-v"))
    assert "OnnxConversion" in session.text
    assert "shapes_cpu" in session.text


# Kinds of terminals


def bake(scale: float) -> tuple[str, ...]:
    """A command whose steps run: no two scales share one."""
    return ("bake", "--base", PIPELINE, "--lora", f"{LORA}:{scale}", "--out", f"pipelines/at{scale}")


def test_a_dumb_terminal_gets_plain_lines_and_no_escape_sequence(terminal: Terminal) -> None:
    dumb = replace(terminal, environment={**terminal.environment, "TERM": "dumb"})
    session = well(dumb.run(*bake(0.61)))
    assert b"\x1b" not in session.raw
    assert "at0.61 unet BindWeights: built in" in session.text
    assert "LoRAs in 84 weights" in session.text
    session = well(dumb.run("generate", PIPELINE, "-p", "a circle", "--steps", "1", "--seed", "1"))
    assert b"\x1b" not in session.raw
    assert "images/001-1.png" in session.text


def test_no_color_shows_no_colour(terminal: Terminal) -> None:
    plain = replace(terminal, environment={**terminal.environment, "NO_COLOR": "1"})
    for command in (bake(0.63), ("passes",), ("validate", "nothing.yaml"), ("verify", PIPELINE, "--quick")):
        session = plain.run(*command)
        assert COLOUR.search(session.raw) is None
        assert "Traceback" not in session.text
    assert COLOUR.search(b"\x1b[1;31mred") is not None


def test_verdicts_and_errors_have_their_colours(terminal: Terminal) -> None:
    passed = well(terminal.run("verify", PIPELINE, "--quick"))
    assert passed.raw.count(b"\x1b[32mpassed\x1b[0m") == 5, "four submodels and the image"
    assert b"\x1b[1;31merror:\x1b[0m" in well(terminal.run("validate", "nothing.yaml"), 2).raw


def test_quiet_says_the_result_alone_and_verbose_every_step(terminal: Terminal) -> None:
    assert well(terminal.run("verify", PIPELINE, "--quick", "--quiet")).shown == ["shapes_cpu: passed"]
    assert well(terminal.run(*README, "--no-evaluate", "-q")).shown == [PIPELINE]
    assert well(terminal.run(*bake(0.68), "-q")).shown == [str(terminal.folder / "pipelines/at0.68")]
    verbose = well(terminal.run(*README, "--no-evaluate", "-v"))
    for name in ("OrtTransformersOptimization", "LayerNormalization", "pooler_output", "covered: "):
        assert name in verbose.text
    assert verbose.text.startswith("nothing to build: all 11 steps are cached")


WIDTHS = {"run": (80, 160, 100), "verify": (100, 80, 160), "plan": (160, 100, 80)}


@pytest.mark.parametrize(
    ("command", "columns"), sampled((command, WIDTHS[command][turn]) for turn in range(3) for command in WIDTHS)
)
def test_a_submodel_is_one_row_of_a_table(terminal: Terminal, command: str, columns: int) -> None:
    arguments = {
        "run": (*README, "--no-evaluate"),
        "verify": ("verify", PIPELINE, "--quick"),
        "plan": ("plan", README[1]),
    }
    session = well(replace(terminal, columns=columns).run(*arguments[command]))
    rows = [line for line in session.shown if line.startswith("  unet ")]
    assert len(rows) == (2 if command == "run" else 1)
    for name in ("text_encoder", "vae_encoder", "vae_decoder"):
        assert sum(line.startswith(f"  {name} ") for line in session.shown) == len(rows)
    assert max(map(len, session.shown)) <= columns
    assert not any(line.startswith("    ") for line in session.shown), "nothing goes below its row"


def test_a_terminal_without_a_size_is_taken_for_80_columns(terminal: Terminal) -> None:
    command = (sys.executable, "-c", NO_SIZE, *bake(0.64))
    session = well(terminal.start_command(*command))
    assert "LoRAs in 84 weights" in session.text


NO_SIZE = """
import fcntl, runpy, struct, sys, termios
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
sys.argv[0] = "sdflow"
runpy.run_module("sdflow", run_name="__main__", alter_sys=True)
"""


def test_only_what_is_a_terminal_gets_a_live_view(terminal: Terminal) -> None:
    """Standard output piped away, then standard error."""
    sdflow = f"{sys.executable} -m sdflow"
    piped = well(terminal.start_command("/bin/sh", "-c", f"{sdflow} {' '.join(bake(0.65))} > out.txt"))
    assert "✓ at0.65 unet: 1 of 3 steps built in" in piped.text
    assert "LoRAs in" not in piped.text
    out = (terminal.folder / "out.txt").read_text()
    assert "LoRAs in 84 weights" in out
    assert "\x1b" not in out
    silent = well(terminal.start_command("/bin/sh", "-c", f"{sdflow} {' '.join(bake(0.66))} 2> err.txt"))
    assert "LoRAs in 84 weights" in silent.text
    assert b"\x1b" not in silent.raw
    err = (terminal.folder / "err.txt").read_text()
    assert "at0.66 unet BindWeights: built in" in err
    assert "\x1b" not in err


def test_a_closed_terminal_ends_a_run_in_order(terminal: Terminal) -> None:
    """With nothing left behind. Where the machine is too busy for that in SECONDS_TO_END, all ends then, as at a kill, and what
    is left is removed by the next `cache gc`."""
    session = replace(terminal, started=None).start("run", TINY, "--no-evaluate", "--no-verify")
    session.until_shown("OnnxConversion")
    process = psutil.Process(session.spawned.pid)
    workers = process.children(recursive=True)
    begun = time.monotonic()
    session.hang_up()
    session.spawned.wait()
    took = time.monotonic() - begun
    assert session.spawned.exitstatus == 130
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    if took >= SECONDS_TO_END:
        well(terminal.run("cache", "gc"))
    assert not list((terminal.folder / "cache/v1/staging").iterdir())
    assert not list((terminal.folder / "tmp").glob("sdflow-*"))
    well(terminal.run("cache", "verify"))


def test_a_run_goes_on_in_a_closed_terminal_that_it_was_cut_loose_from(terminal: Terminal) -> None:
    """As after `nohup` or `disown`: nothing can be written, and nothing fails for it."""
    script = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
code = subprocess.call([sys.executable, "-m", "sdflow", *{bake(0.67)!r}], stdout=open("loose.txt", "w"))
open("code", "w").write(str(code))
"""
    session = terminal.start_command(sys.executable, "-c", script)
    session.until_shown("at0.67")
    session.hang_up()
    until(lambda: (terminal.folder / "code").exists() and (terminal.folder / "code").read_text() != "")
    assert (terminal.folder / "code").read_text() == "0"
    assert "LoRAs in 84 weights" in (terminal.folder / "loose.txt").read_text()
    session.spawned.wait()


def test_ctrl_c_while_an_image_is_drawn_leaves_no_bar(terminal: Terminal) -> None:
    session = terminal.start("generate", PIPELINE, "-p", "a circle", "--steps", "900")
    session.until_shown("image 1")
    session.interrupt()
    session.end()
    well(session, 130)
    assert session.shown[-1].startswith("interrupted: ")
    assert "━" not in session.text


# Servers

QUICK = ("--lanes", "1", "--batch-sizes", "1", "--threads", "1")
"""Nothing is measured at the start."""


def test_serve_says_that_it_is_ready_and_ends_at_ctrl_c(terminal: Terminal) -> None:
    session = terminal.start("serve", PIPELINE, "--port", "0", *QUICK)
    session.until_shown('"event": "ready"')
    session.interrupt()
    session.end()
    assert session.status == 0, session.text
    assert '"event": "ended"' in session.text
    assert "Traceback" not in session.text


def test_serve_ends_in_order_when_its_terminal_is_closed(terminal: Terminal) -> None:
    session = terminal.start("serve", PIPELINE, "--port", "0", *QUICK)
    session.until_shown('"event": "ready"')
    below = psutil.Process(session.spawned.pid).children(recursive=True)
    assert below
    session.hang_up()
    session.spawned.wait()
    assert session.spawned.exitstatus == 0
    assert psutil.wait_procs(below, timeout=60)[1] == []


@pytest.fixture
def deployed(terminal: Terminal) -> Iterator[Session]:
    session = terminal.run("deploy", "shapes", PIPELINE, *QUICK)
    yield session
    terminal.run("terminate", "shapes")


def test_a_server_is_deployed_queried_listed_and_terminated(terminal: Terminal, deployed: Session) -> None:
    assert "running" in well(deployed).text
    query = well(terminal.run("query", "shapes", "a red circle", "--steps", "1", "--seed", "3", "--out", "asked"))
    assert "asked/001-3.png" in query.text
    assert "http://127.0.0.1:" in well(terminal.run("status")).text
    assert "shapes: stopped (process" in well(terminal.run("terminate", "shapes")).words


def test_a_question_can_be_answered_and_declined(terminal: Terminal) -> None:
    session = terminal.start("cache", "clean", "--cache", "nothing")
    session.until_shown("N]:")
    session.type("n\n")
    assert session.end() != 0
    assert "Traceback" not in session.text
    session = terminal.start("cache", "clean", "--cache", "nothing")
    session.until_shown("N]:")
    session.interrupt()
    assert session.end() == 130, session.text
    assert "Traceback" not in session.text


def test_a_selftest_shows_the_live_view_and_ends_at_ctrl_c(terminal: Terminal) -> None:
    session = terminal.start("selftest", "--cache", "anew")
    session.until_shown("OnnxConversion")
    session.interrupt()
    session.end()
    well(session, 130)


# Names


@pytest.mark.skipif(sys.platform == "darwin", reason="there no file has such a name")
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", README[1], "--out", "out-\udcff"),
        ("run", README[1], "--results", "out-\udcff"),
        ("run", README[1], "--cache", "out-\udcff"),
        ("bake", "--base", PIPELINE, "--lora", LORA, "--out", "out-\udcff"),
        ("init", "--model", "sample:shapes", "--out", "out-\udcff"),
        ("cache", "key", "out-\udcff"),
    ],
)
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_done(
    terminal: Terminal, arguments: tuple[str, ...]
) -> None:
    session = well(terminal.run(*arguments), 2)
    assert session.text.startswith("error: sdflow: 'out-\\udcff' is not UTF-8")
    assert not list(terminal.folder.glob("out-*"))


def test_a_folder_that_is_a_link_to_one_whose_name_is_not_utf8_is_refused_too(terminal: Terminal) -> None:
    (terminal.folder / "there\udcff").mkdir()
    (terminal.folder / "link").symlink_to("there\udcff")
    for option in ("--out", "--results", "--cache"):
        session = well(terminal.run(*README, option, "link"), 2)
        assert "is not UTF-8" in session.words
    assert not list((terminal.folder / "link").iterdir())


def test_line_ends_and_escape_sequences_in_names_reach_no_terminal(terminal: Terminal) -> None:
    name = "two\nlines\x1b[31m.yaml"
    (terminal.folder / name).write_text(f"extends: {README[1]}\n")
    session = well(terminal.run("validate", name))
    assert "two\\nlines\\x1b[31m.yaml: valid" in session.text
    assert b"\x1b" not in session.raw
    missing = well(terminal.run("validate", f"no{name}"), 2)
    assert b"\x1b[31m." not in missing.raw
    assert missing.shown[0].startswith("error: notwo\\nlines\\x1b[31m.yaml")


def test_what_the_encoding_of_standard_output_lacks_is_spelled(terminal: Terminal) -> None:
    (terminal.folder / "größe.yaml").write_text(f"extends: {README[1]}\n")
    ascii_only = replace(terminal, environment={**terminal.environment, "PYTHONIOENCODING": "ascii"})
    assert "gr\\xf6\\xdfe.yaml: valid" in well(ascii_only.run("validate", "größe.yaml")).text


def test_a_folder_whose_links_lead_nowhere_is_told_by_every_command_that_reads_it(terminal: Terminal) -> None:
    """As after it was moved without its cache."""
    moved = terminal.folder / "elsewhere/moved"
    shutil.copytree(terminal.folder / PIPELINE, moved, symlinks=True)
    for link in [path for path in moved.rglob("*") if path.is_symlink()]:
        names = [path.name for path in link.iterdir()]
        link.unlink()
        link.mkdir()
        for each in names:
            (link / each).symlink_to("gone")
    name = "elsewhere/moved"
    for command in (
        ("bench", name, "--no-check"),
        ("tune", name),
        ("generate", name, "-p", "x"),
        ("export", name, "--one-file", "x.onnx"),
        ("serve", name, "--port", "0"),
        ("deploy", "moved", name),
        ("inspect", name),
    ):
        session = terminal.run(*command)
        assert "Traceback" not in session.text, session.text
        assert session.status in (2, 4) or command[0] == "inspect", session.text
