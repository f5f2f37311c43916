"""How `sdflow bake` reads what follows --lora."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.bake import parse_lora
from sdflow.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ink.safetensors", "a#b.safetensors", "w:0.5"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "reference", "scale", "name"),
    [
        ("D/ink.safetensors", "D/ink.safetensors", 1.0, None),
        ("D/ink.safetensors:.5", "D/ink.safetensors", 0.5, None),
        ("D#ink.safetensors:-1", "D", -1.0, "ink.safetensors"),
        ("D:2", "D", 2.0, None),
        ("D/a#b.safetensors:2", "D/a#b.safetensors", 2.0, None),
        ("D/w:0.5", "D/w:0.5", 1.0, None),
        ("D/w:0.5:3", "D/w:0.5", 3.0, None),
        ("hf:a/b", "hf:a/b", 1.0, None),
        ("hf:a/b@x:0.5", "hf:a/b@x", 0.5, None),
        ("hf:a/b@x#f.safetensors:0.5", "hf:a/b@x", 0.5, "f.safetensors"),
    ],
)
def test_a_lora_its_scale_and_which_of_several(
    folder: Path, text: str, reference: str, scale: float, name: str | None
) -> None:
    spec = parse_lora(text.replace("D", str(folder)))
    assert (spec.reference, spec.scale, spec.weight_name) == (reference.replace("D", str(folder)), scale, name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("D/ink.safetensors:abc", r"the scale 'abc' is no number\n  Write .*ink\.safetensors:0\.8, or leave it out"),
        ("hf:a/b:abc", "the scale 'abc' is no number"),
        ("D:1e999", "too large"),
        ("D/gone.safetensors:0.5", "there is no file or folder '.*gone.safetensors'"),
        ("D/gone#ink.safetensors", "there is no file or folder"),
        ("", "there is no file or folder ''"),
        (":0.5", "there is no file or folder ''"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_lora(text.replace("D", str(folder)))
