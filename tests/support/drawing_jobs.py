"""What the tests have in common that run the commands on one small pipeline after another, from the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from shell import Shell
from small_lora import write_lora

from sdflow.manifest import read_manifest

SMALL = ("--height", "64", "--width", "64")
DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", *SMALL, "--threads", "1")


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        assert image.size == (64, 64)
        found: bytes = image.tobytes()
    return found


def drawn(shell: Shell, folder: str, name: str, *more: str) -> bytes:
    """The pixels of the first image of `generate`, written to the folder `name`."""
    shell.json("generate", folder, *DRAW, *more, "--out", name)
    return pixels(shell.folder / name / "001-1.png")


def assert_a_bake_changes_only_what_the_lora_does(shell: Shell, folder: str, *shown: str) -> None:
    """shown: arguments of `generate` that the image follows before and after. What they need is still there."""
    write_lora(shell.folder / "ink.safetensors")
    shell.json("bake", "--base", folder, "--lora", "ink.safetensors", "--out", "baked/ink")
    before, after = (read_manifest(shell.folder / each).artifacts for each in (folder, "baked/ink"))
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"unet", "text_encoder"}
    assert drawn(shell, "baked/ink", "inked", *shown) != drawn(shell, folder, "uninked", *shown)


def assert_bench_finds_both_right(shell: Shell, folder: str, *more: str) -> dict[str, Any]:
    """Our images and PyTorch's own, in one report, which is given back."""
    settings = ("--size", "64", "--rounds", "1", "--threads", "1", "-e", "ort-cpu", "-e", "torch-sdpa")
    measured: dict[str, Any] = shell.json("bench", folder, *settings, *more)
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}
    return measured


def assert_tune_runs(shell: Shell, folder: str) -> None:
    tuned = shell.json("tune", folder, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"
