"""How `sdflow bake` reads what follows --lora."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.manifest import Chain, Origin, WrittenPass
from sdflow.run.bake import parse_lora, workflow_of


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
        ("D/ink.safetensors:abc", r"the scale 'abc' is not a number\n  Write .*ink\.safetensors:0\.8, or leave it out"),
        ("hf:a/b:abc", "the scale 'abc' is not a number"),
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


@pytest.mark.parametrize("name", ["Gone", "a\0b", "y" * 10_000, "gone.py"])
def test_a_manifest_that_names_a_pass_that_is_not_here_is_told(tmp_path: Path, name: str) -> None:
    chain = Chain((WrittenPass("OnnxConversion", {}), WrittenPass(name, {})), ())
    origin = Origin("small", "cpu", model="synthetic:sd15-tiny", chains={"vae_decoder": chain})
    with pytest.raises(UsageError, match=r"sdflow.json: in the chain of vae_decoder: ") as raised:
        workflow_of(tmp_path / "sdflow.json", origin, [], "baked")
    assert len(str(raised.value)) < 1500
    empty = Origin("small", "cpu", model="synthetic:sd15-tiny", chains={"vae_decoder": Chain((), ())})
    with pytest.raises(UsageError, match="does not list the passes of vae_decoder"):
        workflow_of(tmp_path / "sdflow.json", empty, [], "baked")
