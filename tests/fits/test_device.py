"""`sdflow plan` and `sdflow doctor` tell whether pipelines fit, or that they do not know the card."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shell import Shell
from started_python import StartedPython

from sdflow.fits import estimate
from sdflow.fits.device import Device, Fit, usual_fits
from sdflow.fits.estimate import memory_need
from sdflow.machine.device_memory import Card, card
from tests.fits.fitting import full_size

SMALL = Card("NVIDIA GeForce RTX 4070", 12282 << 20)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None) -> Shell:
    return Shell(tmp_path_factory.mktemp("device"), started_python)


def test_plan_tells_before_the_build_whether_a_pipeline_fits(shell: Shell) -> None:
    done = shell.run("plan", "flux2_klein", "--target", "cuda", "--device-memory", "12GB")
    assert done.returncode == 0, done.stderr
    assert "fits with --keep fit --device-memory 11500MB in 12 GB" in " ".join(done.stdout.split())


def test_the_words_tell_how_a_pipeline_fits() -> None:
    need = memory_need(*full_size("flux2_klein"))
    streams = "fits with --keep fit --device-memory 7500MB in 8 GB, which streams 2.39 GB of the transformer's 7.75 GB"
    for size, said in ((2, "does not fit"), (8, streams), (20, "fits with --keep all in 20 GB"), (24, "fits in 24 GB")):
        assert said in Fit(need, Device(size * 10**9, None), "cuda").words


def test_elsewhere_than_on_linux_nothing_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "STREAMS", False)
    fit = Fit(memory_need(*full_size("flux2_klein")), Device(8 * 10**9, None), "cuda")
    assert "does not fit in 8 GB" in fit.words and fit.as_json()["streamed"] is None


def test_plan_as_json_has_the_figures(shell: Shell) -> None:
    memory = shell.json("plan", "flux2_klein", "--target", "cuda", "--device-memory", "12GB")["memory"]
    (found,) = memory.values()
    expected = memory_need(*full_size("flux2_klein"))
    assert found["resident"] == expected.peak("resident") and found["turns"] == expected.peak("turns")
    assert (found["available"], found["fits"]) == (12_000_000_000, "turns")
    assert found["weights"]["transformer"] == expected.submodels["transformer"].weights


def test_a_machine_without_a_card_is_told_as_that() -> None:
    fit = Fit(memory_need(*full_size("sdxl")), Device(None, None), "cuda")
    assert fit.way is None and fit.as_json()["fits"] is None
    assert "this machine's card is unknown: use --device-memory SIZE to check whether it fits" in fit.words


def test_the_doctor_sorts_the_models_by_how_they_fit() -> None:
    ways = {name: fit.way for name, fit in usual_fits(Device(None, SMALL))}
    assert ways == {
        "sd15": "resident", "sdxl": "resident", "sd35_medium": "turns", "flux2_klein": "turns", "z_image_turbo": "streamed",
        "flux1_schnell": "streamed",
    }  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="the command that stands for nvidia-smi is a shell script")
def test_the_card_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVIDIA's library is not there."""
    from sdflow.machine import device_memory

    if device_memory._of_nvml() is not None:
        pytest.skip("this machine has a card of its own")
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for said, expected in (
        ("echo 'NVIDIA GeForce RTX 4070, 12282'; echo 'NVIDIA T4, 15360'", SMALL),
        ("echo 'No devices were found'", None),
        ("exit 9", None),
    ):
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
        assert card() == expected
