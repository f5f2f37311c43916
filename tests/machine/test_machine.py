"""What is installed on this machine, asked in one place."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sdflow
from sdflow.errors import TargetUnavailableError, UsageError
from sdflow.machine import packages
from sdflow.machine.device import cores, device
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.packages import distribution_version, installed_version, installed_versions, versions
from sdflow.machine.providers import onnxruntime_for, require_package
from sdflow.targets import ONNXRUNTIME_FLAVOURS, TARGETS

ABSENT = "no-such-distribution"
HEAVY = {"torch", "onnx", "onnxruntime", "psutil"}


def test_versions_are_those_of_the_metadata() -> None:
    assert installed_version("numpy") == metadata.version("numpy")
    assert installed_version(ABSENT) is None
    assert installed_versions("numpy", ABSENT) == {"numpy": metadata.version("numpy")}
    found = versions()
    assert (found["sdflow"], found["torch"]) == (sdflow.__version__, metadata.version("torch"))
    assert set(found) & set(ONNXRUNTIME_FLAVOURS), "ONNX Runtime under the name of its package"


def test_onnxruntime_is_found_under_any_of_its_names() -> None:
    assert distribution_version("onnxruntime") == import_onnxruntime().__version__


def test_a_package_that_must_be_there_and_is_not_is_told_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=rf"the package {ABSENT} is not installed\n  pip install {ABSENT}"):
        distribution_version(ABSENT)


def test_asking_for_versions_and_packages_loads_no_library() -> None:
    code = (
        "import sys; from sdflow.machine import device, packages, providers; from sdflow.targets import TARGETS\n"
        "packages.versions(); packages.distribution_version('onnxruntime'); providers.require_package(TARGETS['cpu'])\n"
        "device.cores(); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_a_provider_that_was_not_built_in_is_refused_by_name() -> None:
    ort, provider = onnxruntime_for(TARGETS["cpu"])
    assert provider == "CPUExecutionProvider"
    if "DmlExecutionProvider" in ort.get_available_providers():
        pytest.skip("this is a machine for DirectML")
    with pytest.raises(TargetUnavailableError):
        onnxruntime_for(TARGETS["directml"])


@pytest.mark.skipif(set(installed_versions(*ONNXRUNTIME_FLAVOURS)) != {"onnxruntime"}, reason="not the CPU's package")
def test_the_package_alone_tells_that_a_target_cannot_run() -> None:
    require_package(TARGETS["cpu"])
    with pytest.raises(TargetUnavailableError, match=r"has the CPU's provider only.*\n  pip install onnxruntime-gpu"):
        require_package(TARGETS["cuda"])


def test_a_device_is_described_in_full() -> None:
    found = device(TARGETS["cpu"])
    assert set(found) == {"processor", "cores", "memory_bytes", "system", "accelerator"}
    assert found["accelerator"] is None
    assert found["cores"] == cores() >= 1
    assert found["memory_bytes"] > 2**28


def test_the_extras_are_those_of_pyproject() -> None:
    """What the messages say is installed with an extra is installed with it."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, names in packages.EXTRAS.items():
        assert sorted(Requirement(each).name for each in extras[extra]) == sorted(names)
        assert packages.how_to_install(*names) == f"pip install 'sdflow[{extra}]'"
    assert packages.how_to_install("torch", "other") == "pip install 'sdflow[build]' other"
    assert packages.how_to_install("torch", "fastapi") == "pip install 'sdflow[build,serve]'"
    hardware = {"bind", "cpu", "cuda", "directml", "migraphx", "nv-tensorrt-rtx", "windowsml"}
    assert set(packages.EXTRAS) == set(extras) - hardware - {"browser", "docs", "test"}, "each is known by its packages"


def test_an_import_that_fails_for_a_missing_extra_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "found_version", lambda name: None)
    told = packages.of_missing_module(ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"))
    assert str(told) == "this needs pillow, which is not installed\n  pip install 'sdflow[build]'"
    assert packages.of_missing_module(ModuleNotFoundError("No module named 'sdflow.x'", name="sdflow.x")) is None
    monkeypatch.setattr(packages, "found_version", lambda name: "1.0")
    assert packages.of_missing_module(ImportError("cannot import name", name="torch")) is None, (
        "it is there, and broken"
    )


def test_diffusers_alone_knows_the_installed_distributions_once_it_asks_for_them() -> None:
    code = """
import importlib.metadata
from sdflow.machine.lean_imports import import_diffusers_alone
import_diffusers_alone()
from diffusers.utils import import_utils
found = import_utils._package_map
assert not vars(found), "they were read"
assert dict(found) == importlib.metadata.packages_distributions() and len(found) > 10
assert import_utils._is_distribution_installed("PIL")[0]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_was_imported_alone_is_the_librarys_own() -> None:
    code = """
import sys
from sdflow.machine.lean_imports import import_module_alone
import_module_alone("transformers", "models.clip.tokenization_clip")
alone = sys.modules["transformers.models.clip.tokenization_clip"].CLIPTokenizer
assert not {"transformers", "transformers.models", "transformers.models.auto"} & sys.modules.keys()
import_module_alone("transformers", "models.clip.there_is_none")
from transformers import CLIPTextModel, CLIPTokenizer
assert CLIPTokenizer is alone and CLIPTextModel.__name__ == "CLIPTextModel"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_imported_alone_gets_from_the_library_around_it_what_was_imported_before(tmp_path: Path) -> None:
    """As in transformers 5.17, whose tokenizers import `AddedToken` from the library itself."""
    inner = tmp_path / "around" / "parts" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "around" / "__init__.py").write_text("from .base import Token")
    (tmp_path / "around" / "base.py").write_text("class Token: ...")
    (tmp_path / "around" / "parts" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (inner / "one.py").write_text("from ...base import Token as token\nfrom ... import Token\nassert Token is token")
    (inner / "two.py").write_text("from ... import Later")
    (tmp_path / "around" / "other.py").write_text("class Token: ...\nfrom enum import auto")
    (inner / "three.py").write_text("from ... import base, other\nfrom ... import Token")
    (tmp_path / "around" / "auto.py").touch()
    (inner / "four.py").write_text("from ... import other, auto\nassert auto.__name__ == 'around.auto'")
    (tmp_path / "around-1.0.dist-info").mkdir()
    (tmp_path / "around-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: around\nVersion: 1.0\n")
    code = """
import sys
from sdflow.machine.lean_imports import import_module_alone
for name, why in {"two": "nothing defines Later", "three": "two modules define a Token"}.items():
    import_module_alone("around", f"parts.inner.{name}")
    assert not [each for each in sys.modules if each.startswith("around")], why
import_module_alone("around", "parts.inner.four")
assert "around.parts.inner.four" in sys.modules
for name in [each for each in sys.modules if each.startswith("around")]:
    del sys.modules[name]
import_module_alone("around", "parts.inner.one")
alone = sys.modules["around.parts.inner.one"].Token
assert "around" not in sys.modules
from around.parts.inner.one import Token
import around
assert Token is alone is around.Token
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("has_distribution", [False, True])
def test_a_library_that_does_not_import_alone_is_left_as_it_was(has_distribution: bool, tmp_path: Path) -> None:
    """A checkout on the path has no distribution. With one, the module fails because its library's own code has not run."""
    folder = tmp_path / "lonely" / "parts"
    folder.mkdir(parents=True)
    (tmp_path / "lonely" / "__init__.py").write_text("ready = {1}")
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("import lonely\ntotal = 1 / len(getattr(lonely, 'ready', ()))")
    if has_distribution:
        (tmp_path / "lonely-1.0.dist-info").mkdir()
        (tmp_path / "lonely-1.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: lonely\nVersion: 1.0\n"
        )
    code = """
import sys
from sdflow.machine.lean_imports import import_module_alone
import_module_alone("lonely", "parts.one")
assert not [name for name in sys.modules if name.startswith("lonely")]
from lonely.parts import one
assert one.total == 1
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
