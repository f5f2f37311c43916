"""What is read from files piece by piece is read once for all runs that need it, and gives what modules in memory give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.distance import relative_l2
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.verify.reference import torch_module
from sdflow.verify.reference.cases import read_cases
from sdflow.verify.reference.reference import compute
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import select
from sdflow.verify.reference.torch_images import IMAGE_FILE
from sdflow.verify.reference.turns import Turns

MOST = 300_000
DRAWING = ("transformer", "vae_decoder")


def request_of(checkpoint: Checkpoint, out: Path, streamed: Mapping[str, int]) -> ReferenceRequest:
    out.mkdir()
    submodels = [name for name in checkpoint.submodels if name != "vae_encoder"]
    tokens = 32 if "unet" not in submodels else None  # CLIP has a length of its own
    chosen = replace(
        select(VerifySpec(), ImageSpec(), submodels, checkpoint), tokens=tokens, prompts=("a fox", ""), steps=2
    )
    return ReferenceRequest(
        family=checkpoint.family.name,
        loads={name: part.load for name, part in checkpoint.submodels.items()},
        companions={name: path.absolute() for name, path in checkpoint.companions.items()},
        loras=(),
        selection=chosen,
        out=out,
        options=checkpoint.options,
        bfloat16=("transformer",),
        most=streamed,
    )


@pytest.mark.parametrize(
    ("architecture", "text", "calls"),
    [
        ("flux2-tiny", "text_encoder", 2),
        pytest.param("z-image-tiny", "text_encoder", 2, marks=pytest.mark.slow),  # Qwen3 too
        ("sd35-tiny", "text_encoder_3", 2),
        pytest.param("flux1-schnell-tiny", "text_encoder_2", 2, marks=pytest.mark.slow),  # T5 too
        ("sd15-tiny", None, 3),  # PNDM calls once more than there are steps
    ],
)
def test_a_reference_read_piece_by_piece_is_that_of_modules_in_memory(
    architecture: str, text: str | None, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
    denoiser = checkpoint.family.denoiser
    reads: Counter[tuple[str, str]] = Counter()
    reader = torch_module.reader

    def counted(submodel: str, *args: Any) -> Callable[[str], Any]:
        read = reader(submodel, *args)

        def one(name: str) -> Any:
            reads[submodel, name] += "." in name  # else it is the module's own, which each has
            return read(name)

        return one

    monkeypatch.setattr(torch_module, "reader", counted)
    found = {}
    for name, streamed in (("whole", {}), ("pieces", dict.fromkeys(filter(None, (text, denoiser)), MOST))):
        request = request_of(checkpoint, tmp_path / name, streamed)
        compute(request, lambda phase: None)
        arrays = {
            (submodel, *key): value
            for submodel in request.selection.submodels
            for key, value in read_cases(request.out, submodel).arrays.items()
        }
        with np.load(request.out / IMAGE_FILE) as images:
            found[name] = arrays | {("image", key): value for key, value in images.items()}
    assert found["whole"].keys() == found["pieces"].keys()
    for key, value in found["whole"].items():
        near = 2e-6 if "float16" not in key else 2e-3
        assert relative_l2(found["pieces"][key], value) <= near, key
    passes = Counter(submodel for submodel, _ in reads)
    assert passes[denoiser] and (text is None or passes[text])
    assert max((count for (submodel, _), count in reads.items() if submodel == text), default=0) <= 1
    assert max(count for (submodel, _), count in reads.items() if submodel == denoiser) == calls, "once for each step"
    drawn = [case for case in read_cases(tmp_path / "pieces", denoiser).cases if case.group == "trajectory"]
    assert len(drawn) == calls


def test_runs_pass_a_part_together_and_one_goes_on_where_another_has_come() -> None:
    turns, seen, made = Turns(), [], []

    def steps(name: str) -> Callable[[], str]:
        def work() -> str:
            for part in range(3):
                if part == 2:
                    made.append(name)
                turns.pause()
                seen.append((part, name))
            return name

        return work

    def later() -> None:
        turns.wait(lambda: bool(made))
        turns.pause()
        seen.append((2, "later"))

    runs = [turns.start(work) for work in (steps("a"), steps("b"), later)]
    turns.finish()
    assert [part for part, _ in seen] == [0, 0, 1, 1, 2, 2, 2]
    assert {name for part, name in seen if part == 2} == {"a", "b", "later"}
    assert [run.result for run in runs] == ["a", "b", None]


def test_what_a_run_raises_ends_the_others_and_is_raised() -> None:
    turns, ended = Turns(), []

    def fails() -> None:
        turns.pause()
        raise ValueError("no weights")

    def goes_on() -> None:
        try:
            turns.pause()
            turns.pause()
            turns.pause()
        finally:
            ended.append(True)

    for work in (goes_on, fails, lambda: turns.wait(lambda: False)):
        turns.start(work)
    with pytest.raises(ValueError, match="no weights"):
        turns.finish()
    assert ended
    assert all(run.ended for run in turns._runs)


def test_runs_that_wait_for_nothing_are_refused() -> None:
    turns = Turns()
    turns.start(lambda: turns.wait(lambda: False))
    with pytest.raises(RuntimeError, match="all runs are waiting for one another"):
        turns.finish()
