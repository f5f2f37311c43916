"""What is published: two distributions that pip installs without the network, of which the first is small."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


def python(*arguments: str | Path, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=where, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build` of sdflow and of its samples, by the backend that is installed here."""
    out = tmp_path_factory.mktemp("dist")
    for source in (ROOT, ROOT / "samples"):
        done = python("-m", "build", "--no-isolation", "--outdir", out, source, where=out)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has what sdflow depends on and no sdflow: the packages of this one come last in its path."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True, with_pip=False)
    packages = place / sorted(place.glob("lib/python*"))[0].relative_to(place) / "site-packages"
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others))
    return place


def install(environment: Path, wheels: Sequence[Path]) -> None:
    to = environment / "bin/python"
    options = ("--no-index", "--no-deps", "--ignore-installed", "--quiet")
    done = python("-m", "pip", "--python", to, "install", *options, *wheels, where=environment)
    assert done.returncode == 0, done.stderr


def run(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [environment / "bin/sdflow", *arguments], cwd=environment, env=kept, capture_output=True, text=True, check=False
    )


def test_twine_finds_nothing_wrong_with_them(made: Path) -> None:
    files = sorted(made.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"] * 2
    done = python("-m", "twine", "check", "--strict", *files, where=made)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 4, done.stdout + done.stderr


def test_the_package_is_small_and_typed_and_has_no_weights(made: Path) -> None:
    (wheel,), (source,) = made.glob("sdflow-*.whl"), made.glob("sdflow-*.tar.gz")
    assert max(wheel.stat().st_size, source.stat().st_size) < 5 * MIB
    with zipfile.ZipFile(wheel) as opened:
        inside = opened.namelist()
    assert "sdflow/py.typed" in inside and any(name.endswith("licenses/LICENSE") for name in inside)
    assert not [name for name in inside if name.endswith((".safetensors", ".pyc"))]
    with tarfile.open(source) as opened_source:
        top = {Path(name).parts[1] for name in opened_source.getnames()}
    assert {"sdflow", "README.md", "LICENSE", "pyproject.toml"} <= top and "tests" not in top


@pytest.mark.skipif(os.name != "posix", reason="the layout of a virtual environment elsewhere")
def test_an_installed_sdflow_finds_the_sample_where_it_is_installed_and_else_says_what_to_install(
    made: Path, environment: Path
) -> None:
    (package,), (samples,) = made.glob("sdflow-*.whl"), made.glob("sdflow_samples-*.whl")
    install(environment, [package])
    without = run(environment, "plan", "shapes")
    assert without.returncode == 2, without.stdout + without.stderr
    assert "needs sdflow-samples, which is not installed" in without.stderr
    assert "pip install 'sdflow[samples]'" in without.stderr
    install(environment, [samples])
    planned = run(environment, "plan", "shapes", "--target", "cpu")
    assert planned.returncode == 0, planned.stderr
    assert "OnnxConversion" in planned.stdout
    loras = next(environment.glob("lib/python*/site-packages/sdflow_samples/loras"))
    inspected = run(environment, "inspect", str(loras / "stripes.safetensors"))
    assert inspected.returncode == 0, inspected.stderr
