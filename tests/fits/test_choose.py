"""`sdflow init --fits`: what is chosen fits, is the least lossy that does, and is there for the target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sdflow.config import load_workflow
from sdflow.disk.shipped import sample_folder
from sdflow.errors import UsageError
from sdflow.fits.choose import Choice, choices, choose, first_fitting
from sdflow.fits.estimate import CONTEXT, WAYS
from sdflow.fits.known import architecture_of, estimated_by
from sdflow.fits.low_bits import CHOOSABLE, Choosable
from sdflow.passes.registry import OWN, catalog
from sdflow.run.init import InitRequest, write_workflow
from sdflow.targets import TARGETS
from sdflow.units import parse_size
from tests.fits.fitting import FULL_SIZE, full_size

GB = 10**9
SIZES = (2, 4, 6, 8, 10, 12, 16, 24, 48, 80)


def chosen(base: str, target: str, gigabytes: float, choosable: Sequence[Choosable] = CHOOSABLE) -> Choice | None:
    try:
        return choose(*full_size(base, target), int(gigabytes * GB), choosable)[0]
    except UsageError:
        return None


@pytest.mark.parametrize(
    ("base", "target"), [*((base, "cuda") for base in FULL_SIZE), ("sd15", "cpu"), ("flux2_klein", "directml")]
)
def test_more_memory_never_loses_more_and_what_is_chosen_fits(base: str, target: str) -> None:
    every = choices(*full_size(base, target))
    before = None
    for size in SIZES:
        fitting = [each for each in every if each.need.needed(each.way) <= size * GB]
        first = first_fitting(every, size * GB)
        assert (first is None) == (not fitting)
        if first is None:
            assert before is None
            continue
        found = first[0]
        assert found.loss == min(each.loss for each in fitting)
        rank = WAYS.index(found.way)
        assert all(each.loss > found.loss or WAYS.index(each.way) >= rank for each in fitting)
        assert before is None or found.loss <= before.loss
        before = found


def test_exact_weights_come_before_quantized_ones_and_resident_before_turns_before_streamed() -> None:
    assert (found := chosen("flux2_klein", "cuda", 24)) and (found.way, found.quantized) == ("resident", {})
    assert (found := chosen("flux2_klein", "cuda", 12)) and (found.way, found.quantized) == ("turns", {})
    assert (found := chosen("flux2_klein", "cuda", 8)) and (found.way, found.quantized) == ("streamed", {})
    # The transformer has 7.75 GB, works in 0.99, and 0.5 + 0.81 are kept free: as the runtime decides.
    for size, way, streams in ((9.95, "streamed", True), (10.15, "turns", False)):
        assert (found := chosen("flux2_klein", "cuda", size)) and found.way == way
        assert bool(found.need.streamed(int(size * GB))) == streams
    _, (quicker,) = choose(*full_size("flux2_klein"), 10 * GB)
    assert {*quicker.quantized} == {"transformer"} and quicker.way == "turns"
    assert 2 < found.need.streamed(8 * GB) / GB < 3


def test_a_pass_that_is_not_there_or_not_for_the_target_is_not_chosen() -> None:
    absent = replace(CHOOSABLE[0], name="QuantizeInt3", loss=0)
    elsewhere = Choosable("QuantizeInt8", "text", ("directml",), 0, "")
    unmeasured = Choosable("QuantizeInt8", "denoiser", ("cuda",), 0, "")
    for each in choices(*full_size("flux2_klein"), (absent, elsewhere, unmeasured)):
        assert each.quantized == {}
    text = replace(elsewhere, targets=("cuda",))
    assert any(
        {name: by.choosable for name, by in each.quantized.items()}.get("text_encoder") == text
        for each in choices(*full_size("flux2_klein"), (text, *CHOOSABLE))
    )


def test_int4_halves_twice() -> None:
    """A text encoder in blocks of 4 bits: 0.5 bytes a weight, a scale of two bytes and half a byte for each 32."""
    by_block = Choosable("QuantizeInt4", "text", ("cuda",), 1, "", {"bits": 4})
    if not by_block.is_there:
        pytest.skip("this version has no QuantizeInt4")
    exact, quantized = (
        next(each for each in choices(*full_size("flux2_klein"), (by_block,)) if bool(each.quantized) == quantized)
        for quantized in (False, True)
    )
    embeddings = 151_936 * 2_560 * 2
    products = exact.need.submodels["text_encoder"].weights - embeddings
    now = quantized.need.submodels["text_encoder"].weights - embeddings
    assert now / products == pytest.approx((0.5 + 2.5 / 32) / 2, rel=0.01)


def test_where_nothing_fits_the_nearest_is_named_and_fits() -> None:
    with pytest.raises(UsageError) as caught:
        choose(*full_size("flux1_schnell"), 2 * GB)
    assert "transformer alone has" in str(caught.value)
    size = str(caught.value.remedy).partition("--fits ")[2].partition(".  ")[0].partition(". ")[0]
    assert chosen("flux1_schnell", "cuda", parse_size(size) / GB) is not None
    assert chosen("flux1_schnell", "cuda", (parse_size(size) - 2e8) / GB) is None


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_who_draws_on_the_cpu_is_not_told_to_draw_there(target: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(*full_size("sd15", target), GB // 2)
    assert ("--target cpu" in str(caught.value.remedy)) == (target != "cpu")


def test_every_choosable_pass_has_options_that_it_takes() -> None:
    from sdflow.passes.registry import find_pass

    for each in CHOOSABLE:
        if each.is_there:
            find_pass(each.name, Path.cwd()).Config(**each.options)


@pytest.mark.parametrize("size", ["6GB", "10GB"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_file_is_valid_and_says_what_was_chosen_and_why(target: str, size: str, tmp_path: Path) -> None:
    out = tmp_path / "w.yaml"
    try:
        written = write_workflow(InitRequest(out, "synthetic:sdxl", target, fits=parse_size(size)))
    except UsageError as error:
        assert "The nearest that fits: --fits" in str(error.remedy) and not out.exists()
        return
    (pipeline,) = load_workflow(written, catalog=catalog()).pipelines
    text = written.read_text()
    assert f"# Chosen for {size.replace('GB', ' GB')} of " in text
    checkpoint = estimated_by(pipeline)
    assert checkpoint is not None
    found, _ = choose(*full_size("sdxl", target), parse_size(size))
    for submodel, each in found.quantized.items():
        assert pipeline.submodels[submodel][-1].pass_name == each.choosable.name in OWN
        assert each.choosable.note in text
    for submodel in found.need.submodels:
        assert f"#   {submodel} " in text
    assert ("copied from host memory" in text) == (found.way == "streamed")
    assert ("of what was measured" in text) == (found.way != "streamed")
    if found.way != "resident" and target == "cuda":
        assert f"--device-memory {(parse_size(size) - CONTEXT) // 10**6}MB" in text


def test_a_refused_size_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "w.yaml"
    out.write_text("mine: true\n")
    with pytest.raises(UsageError, match="--fits"):
        write_workflow(InitRequest(out, "synthetic:sdxl", "cuda", force=True, fits=GB))
    assert yaml.safe_load(out.read_text()) == {"mine": True}


def test_a_config_that_lacks_an_entry_is_named_and_the_file_that_was_there_stays(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "w.yaml"
    shutil.copytree(sample_folder("shapes"), model)
    config = model / "unet/config.json"
    entries = json.loads(config.read_text())
    del entries["cross_attention_dim"]
    config.write_text(json.dumps(entries))
    out.write_text("mine: true\n")
    with pytest.raises(UsageError, match="lack 'cross_attention_dim'"):
        write_workflow(InitRequest(out, str(model), "cuda", force=True, fits=10 * GB))
    assert yaml.safe_load(out.read_text()) == {"mine": True}


def test_an_interrupted_choice_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sdflow.run.init.fit_workflow", interrupted)
    out = tmp_path / "w.yaml"
    for before in (None, "mine: true\n"):
        if before:
            out.write_text(before)
        with pytest.raises(KeyboardInterrupt):
            write_workflow(InitRequest(out, "synthetic:sdxl", "cuda", force=True, fits=GB))
        assert (out.read_text() if out.exists() else None) == before


def test_a_model_of_the_hub_that_a_shipped_workflow_names_needs_no_download(tmp_path: Path) -> None:
    reference = "hf:black-forest-labs/FLUX.2-klein-4B"
    assert architecture_of(reference) == "flux2-klein-4b"
    written = write_workflow(InitRequest(tmp_path / "w.yaml", reference, "cuda", fits=10 * GB))
    assert "streams 390 MB of the transformer's 7.75 GB" in " ".join(written.read_text().replace("\n#", "").split())
    with pytest.raises(UsageError, match="not on this machine"):
        write_workflow(InitRequest(tmp_path / "x.yaml", "hf:somebody/else", "cuda", base="sdxl", fits=10 * GB))
