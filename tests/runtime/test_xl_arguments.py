"""What only Stable Diffusion XL takes: second prompts, as diffusers reads them, and sizes; what is wrong is told by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import Shell
from started_python import StartedPython

from sdflow.build.assemble import assemble
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.request import Request
from sdflow.manifest import Origin
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint

FAMILY = FAMILIES["stable_diffusion_xl"]
PROMPTS = ["a horse", "a red house"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_pipeline(open_checkpoint("synthetic:sdxl-tiny", digests=PlainDigests(), download=False))


@pytest.mark.parametrize(
    "second",
    [None, "", "oil on canvas", ["oil on canvas", "ink"], ["", "ink"], []],
    ids=["none", "empty", "one for all", "one for each", "an empty one of several", "none of several"],
)
def test_second_prompts_are_read_as_diffusers_reads_them(theirs: Any, second: Any) -> None:
    def run(name: str, inputs: Mapping[str, torch.Tensor]) -> Any:
        part = FAMILY.part(name)
        return part.model.reference(getattr(theirs, part.component), inputs)

    # One text for several prompts is sdflow's own: diffusers takes it for one prompt alone.
    each = [second] * len(PROMPTS) if second and isinstance(second, str) else second
    given = {"prompt_2": second, "negative_prompt_2": second}
    FAMILY.require_arguments(given, len(PROMPTS))
    request = Request(PROMPTS, ["blurry", "grey"], 5.0, 64, 64, more=given)
    with torch.no_grad():
        ours = FAMILY.condition(run, theirs.components, FAMILY.options, request).inputs
        prompt, negative, pooled, pooled_negative = theirs.encode_prompt(
            PROMPTS, each, "cpu", 1, True, ["blurry", "grey"], each
        )
    torch.testing.assert_close(ours["encoder_hidden_states"], torch.cat([negative, prompt]))
    torch.testing.assert_close(ours["text_embeds"], torch.cat([pooled_negative, pooled]))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prompt_2": ["a", "b", "c"]}, "3 texts for 2 prompts"),
        ({"negative_prompt_2": ["a"]}, "1 texts for 2 prompts"),
        ({"original_size": (0, 0)}, r"invalid value \(0, 0\)"),
        ({"target_size": (512,)}, r"invalid value \(512,\)"),
        ({"target_size": 512}, "invalid value 512"),
        ({"original_size": (512.5, 512)}, r"invalid value \(512.5, 512\)"),
        ({"crops_coords_top_left": (-1, 0)}, r"invalid value \(-1, 0\)"),
        ({"prompt_3": "a"}, "has no argument prompt_3"),
    ],
)
def test_a_value_that_an_argument_cannot_have_is_refused_by_the_arguments_name(
    given: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        FAMILY.require_arguments(given, 2)
    assert caught.value.where == next(iter(given))


def test_a_crop_at_the_corner_and_lists_are_sizes() -> None:
    FAMILY.require_arguments({"crops_coords_top_left": (0, 0), "original_size": [512, 768], "target_size": None}, 1)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None) -> Shell:
    return Shell(tmp_path_factory.mktemp("xl_arguments"), started_python)


def folder(shell: Shell, family: str) -> str:
    """A pipeline folder without submodels: what is refused is refused before they are looked for."""
    path: Path = shell.folder / family
    assemble(path, parts={}, companions={}, origin=Origin(family, "cpu", family=family))
    return str(path)


@pytest.mark.parametrize(
    ("family", "typed", "says"),
    [
        ("stable_diffusion_xl", ("--original-size", "0x0"), "--original-size: invalid value (0, 0)"),
        ("stable_diffusion", ("--crop", "0x0"), "--crop: Stable Diffusion 1.x and 2.x has no argument --crop"),
    ],
)
def test_what_is_wrong_is_said_of_the_option_that_was_typed(
    shell: Shell, family: str, typed: tuple[str, ...], says: str
) -> None:
    done = shell.run("generate", folder(shell, family), "--prompt", "a horse", *typed)
    assert done.returncode == 2 and says in done.stderr
    assert "crops_coords" not in done.stderr and "original_size" not in done.stderr
