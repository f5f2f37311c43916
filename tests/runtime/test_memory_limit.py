"""What drawing takes in memory is estimated as it is measured, the largest image follows from it, and the VAE works in bands
before memory ends."""

from __future__ import annotations

import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.errors import TiledWarning
from sdflow.machine import memory
from sdflow.runtime import vae
from sdflow.runtime.bands.memory import LEAST_BAND, stored_bytes
from sdflow.runtime.files.folder import folder_family, onnx_submodels, submodel_config
from sdflow.runtime.memory_limit import MOST_SIDES, drawing_bytes, most_pixels
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.working_bytes import row_bytes

MEASURED = """
import sys
from pathlib import Path
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.targets import TARGETS

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

folder, name, side, port = sys.argv[1:]
model = load_submodel(Path(folder), name, TARGETS["cpu"], options=LoadOptions(threads=1))
sizes = {"batch": 1, "sequence": 77, "latent_height": int(side), "latent_width": int(side)}
bound = model.bound(**model.shapes(sizes))
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
bound.run()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
@pytest.mark.parametrize(("name", "side", "times"), [("unet", 64, 2), ("vae_decoder", 64, 1)])
def test_what_a_run_takes_is_estimated_as_it_is_measured(tiny_pipeline: Path, name: str, side: int, times: int) -> None:
    """At this size most of it are the scores of attention. times: how often a UNet that is not fused, as this one, has them; the
    estimate is for one that is."""
    command = [sys.executable, "-c", MEASURED, str(tiny_pipeline), name, str(side), "x"]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    config = submodel_config(tiny_pipeline, name)
    model = folder_family(tiny_pipeline).part(name).of(config).model
    estimated = row_bytes(model, config, (side, side), "cpu")
    assert 0.4 * times * estimated < measured < 1.3 * times * estimated, (measured, estimated)


def test_the_largest_image_grows_with_memory_up_to_what_the_model_was_made_for(tiny_pipeline: Path) -> None:
    family = folder_family(tiny_pipeline)
    configs = {name: submodel_config(tiny_pipeline, name) for name in onnx_submodels(tiny_pipeline)}
    latents = family.latents(configs)
    own = latents.image_size**2
    found = [most_pixels(tiny_pipeline, available) for available in (0, 2**26, 2**28, 2**30, 2**50)]
    assert found == sorted(found) and len(set(found)) > 3
    assert (found[0], found[-1]) == (own, MOST_SIDES**2 * own)
    for available, pixels in zip((2**26, 2**28, 2**30), found[1:], strict=False):
        side = int(pixels**0.5) // latents.scale
        assert pixels == own or drawing_bytes(family, configs, side) <= available
        assert pixels == found[-1] or drawing_bytes(family, configs, side + latents.multiple) > 0.9 * available
    assert most_pixels(tiny_pipeline, 2**28, images=8) < most_pixels(tiny_pipeline, 2**28)
    assert most_pixels(tiny_pipeline, 2**28, device="cuda") >= most_pixels(tiny_pipeline, 2**28)
    assert own <= most_pixels(tiny_pipeline) <= found[-1]


def test_it_is_known_without_heavy_imports(tiny_pipeline: Path) -> None:
    code = (
        "import sys; from sdflow.runtime.memory_limit import most_pixels; most_pixels(sys.argv[1], 2**30);"
        "print([name for name in ('torch', 'onnx', 'onnxruntime', 'diffusers') if name in sys.modules])"
    )
    code = code.replace("sys.argv[1]", "__import__('pathlib').Path(sys.argv[1])")
    said = subprocess.run([sys.executable, "-c", code, str(tiny_pipeline)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 5\ninactive_file 300\n"}, 400),
        ({"memory.max": "max\n", "memory.current": "900\n", "memory.stat": "inactive_file 300\n"}, None),
        ({"memory.max": "1000\n", "memory.current": "5000\n", "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "100\n",
                "memory/memory.stat": "total_inactive_file 50\n",
            },
            950,
        ),
        ({}, None),
    ],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    found = memory.available_bytes()
    assert found == left if left is not None else found > 1000


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets so many bytes be free, as far as the VAE knows."""

    def make(free: int) -> None:
        monkeypatch.setattr(vae, "available_bytes", lambda device: free)
        monkeypatch.setattr(vae, "ALWAYS_THERE", 0)

    return make


def test_where_memory_is_short_the_decoder_gives_the_same_image_in_bands_and_says_so(
    tiny_pipeline: Path, short: Callable[[int], None]
) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    latents = torch.randn(pipeline.latents_shape(1, 192, 256), generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TiledWarning)
        whole = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False).decode(latents)
    short(2**20)
    with pytest.warns(
        TiledWarning, match=r"vae decoder runs in bands of 48 pixels: the whole image needs about .* free"
    ):
        banded = pipeline.decode(latents)
    assert 0 < (banded - whole).abs().max() < 1e-5


def test_bands_are_as_large_as_fits_and_store_on_the_device_what_fits(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    decoder = pipeline.submodels["vae_decoder"]
    bands = vae._halved_bands(128)
    found = [vae._bands_that_fit(decoder, 128, 128, 8, bands, free) for free in (0, 2**29, 2**30, 2**40)]
    sizes = [tiling.pixels for tiling, _ in found]
    assert sizes[0] == 8 * LEAST_BAND and sizes == sorted(sizes) and sizes[-1] == 512
    assert all(needed <= free for (_, needed), free in zip(found[1:], (2**29, 2**30, 2**40), strict=True))
    on_cuda: Any = SimpleNamespace(part=decoder.part, config=decoder.config, place=SimpleNamespace(device="cuda"))
    stored = stored_bytes(decoder.config, 1024, 1024)
    for host, free, storage in ((2 * stored + 2, 2**24, "cpu"), (2 * stored, 2**24, None), (0, 2**40, "cuda")):
        monkeypatch.setattr(vae, "available_bytes", lambda device, host=host: host)
        chosen, _ = vae._bands_that_fit(on_cuda, 128, 128, 8, bands, free)
        assert chosen is not None and chosen.storage == storage


def test_bands_that_neither_memory_holds_are_tiles_and_a_warning_says_so(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory is not swapped: taking more than there is ends the process, or others."""
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    latents = torch.randn(pipeline.latents_shape(1, 384, 640), generator=torch.Generator().manual_seed(3))
    whole = pipeline.decode(latents)
    device = "cpu:0"  # torch's other name of the CPU stands for a device with memory of its own
    for tiles in (None, True):
        short = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, vae_tiles=tiles)
        decoder = short.submodels["vae_decoder"]
        decoder.place = replace(decoder.place, device=device)
        monkeypatch.setattr(vae, "ALWAYS_THERE", 0)
        monkeypatch.setattr(vae, "available_bytes", lambda asked: 2**20 if asked == device else 2**22)
        with pytest.warns(TiledWarning, match=r"is tiled \(\d+ pixels\), .*bands would keep .* only 4.19 MB is free"):
            tiled = short.decode(latents)
        assert tiled.shape == whole.shape and 1e-3 < (tiled - whole).abs().max() < 1


def test_sessions_of_bands_are_freed_for_another_size_and_once_none_are_needed(
    tiny_pipeline: Path, short: Callable[[int], None]
) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    decoder = pipeline.submodels["vae_decoder"]

    def bands_after(height: int) -> weakref.ref[Any] | None:
        pipeline.decode(torch.zeros(pipeline.latents_shape(1, height, 256)))
        return None if decoder.banded is None else weakref.ref(decoder.banded[1])

    short(2**20)
    with warnings.catch_warnings(action="ignore", category=TiledWarning):
        first, again, other = bands_after(192), bands_after(192), bands_after(256)
        assert first is again is not None and first() is None, "another size has other sessions"
        assert other is not None and other() is not None
        assert vae.tiling(decoder, 24, 32, pipeline.latents.scale, None) is not None
        assert other() is None, "before a denoiser for the next size takes its memory"
        last = bands_after(256)
        assert last is not None and last() is not None
        short(2**40)
        assert bands_after(256) is None and last() is None


def test_on_cuda_a_decoder_is_not_tiled_where_its_measured_memory_is_free(tiny_pipeline: Path) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    decoder = pipeline.submodels["vae_decoder"]
    own = vae.tile_pixels(decoder.config) // decoder.part.model.scale(decoder.config)
    on_cuda: Any = SimpleNamespace(
        part=decoder.part, config=decoder.config, place=SimpleNamespace(device="cuda", stream=None)
    )
    whole = row_bytes(decoder.part.model, decoder.config, (own, own), "cuda")
    assert (
        vae._wanted(on_cuda, own, own) == int(whole * decoder.part.model.device_factor) < vae._wanted(decoder, own, own)
    )
    larger = row_bytes(decoder.part.model, decoder.config, (own, own + 1), "cuda")
    assert vae._wanted(on_cuda, own, own + 1) == larger, "was not measured"


def test_an_image_starts_from_an_encoding_in_bands_too(tiny_pipeline: Path, short: Callable[[int], None]) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    image = torch.rand(1, 3, 192, 256, generator=torch.Generator().manual_seed(1)) * 2 - 1
    whole = pipeline.encode(image)
    pipeline.submodels["vae_encoder"].unload()
    short(2**20)
    with pytest.warns(TiledWarning, match=r"vae encoder runs in bands of 48 pixels"):
        banded = pipeline.encode(image)
    assert banded.shape == whole.shape and 0 < (banded - whole).abs().max() < 1e-4


def test_what_ran_whole_once_goes_on_so_and_who_says_it_gets_it_whole(
    tiny_pipeline: Path, short: Callable[[int], None]
) -> None:
    latents = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(1))
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    forced = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, vae_tiles=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TiledWarning)
        whole = pipeline.decode(latents)
        short(0)
        assert torch.equal(pipeline.decode(latents), whole), "its session holds the memory"
        assert torch.equal(forced.decode(latents), whole)
        asked = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, vae_tiles=True).decode(latents)
    assert 0 < (asked - whole).abs().max() < 1e-5


def test_a_decoder_is_created_beside_a_denoiser_only_if_both_fit(
    tiny_pipeline: Path, short: Callable[[int], None]
) -> None:
    """On a device it is also run then: one that only fits alone would fail, and with it an image that is possible in bands."""
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    decoder, shape = pipeline.submodels["vae_decoder"], pipeline.latents_shape(1, 192, 256)
    alone = int(vae._wanted(decoder, *shape[2:]) / vae.SHARE)
    for free, created in ((alone + 2**20, 0), (alone + 2**30, 1)):
        short(free)
        assert vae.tiling(decoder, *shape[2:], pipeline.latents.scale, None) is None
        pipeline.denoisers.unload()
        pipeline.denoiser(shape, 2)
        assert len(decoder._bound) == created


def test_generate_takes_the_option(tiny_pipeline: Path, tmp_path: Path) -> None:
    def draw(option: str) -> np.ndarray:
        from PIL import Image

        size = ["--height", "256", "--width", "192", "--steps", "1", "--seed", "1"]
        command = ["generate", str(tiny_pipeline), "-p", "a", *size, "--out", str(tmp_path / option), option]
        result = CliRunner().invoke(app, [*command, "--no-safety-checker"])
        assert result.exit_code == 0, result.output
        drawn = Image.open(tmp_path / option / "001-1.png")
        assert ('"vae_tiles": 80' in drawn.info["sdflow"]) == (option == "--vae-tiles")
        return np.asarray(drawn, np.int16)

    assert abs(draw("--vae-tiles") - draw("--no-vae-tiles")).max() <= 1
