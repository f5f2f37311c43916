"""What each family's small workflow builds for each target, that target's provider has kernels for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from shell import Shell

from sdflow.artifact import CONFIG_FILE, MODEL_FILE
from sdflow.disk.input_file import read_json
from sdflow.families import FAMILIES
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.finding import errors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(
    "workflow",
    [
        "tiny", "sdxl_tiny", "sdxl_refiner_tiny",
        "tiny_ip_adapter", "tiny_controlnet", "sd21_tiny", "sd_turbo_tiny", "lcm_tiny",
        "sd15_inpainting_tiny", "sd15_taesd_tiny", "sdxl_tiny_ip_adapter", "sdxl_tiny_controlnet",
        "sdxl_turbo_tiny", "lcm_sdxl_tiny", "sdxl_with_refiner_tiny",
        "sd35_tiny", "flux1_schnell_tiny", "flux2_tiny", "z_image_tiny",
    ],
)  # fmt: skip
def test_a_family_fits_every_target(shell: Shell, workflow: str) -> None:
    targets = [word for name in TARGETS for word in ("--target", name)]
    built = shell.json("run", workflow, "--no-verify", "--no-evaluate", *targets)["pipelines"]
    assert {read_manifest(shell.folder / each["folder"]).origin.target for each in built} == set(TARGETS)
    for each in built:
        for manifest in (shell.folder / each["folder"]).glob(f"**/{MANIFEST_FILE}"):
            for graph in (graphs := sorted(manifest.parent.glob(f"*/{MODEL_FILE}"))):
                assert lacking(graph) == [], f"{each['name']}, {graph.parent.name}"
            assert len(graphs) >= 3, "the text encoder, the denoiser and the decoder at least"


def lacking(graph: Path) -> list[str]:
    """What the target's provider has no kernel for, of what drawing reads."""
    origin, submodel = read_manifest(graph.parents[1]).origin, graph.parent.name
    read = FAMILIES[origin.family].part(submodel).read
    outputs = None if read is None else read(read_json(graph.with_name(CONFIG_FILE)))
    loaded = onnx.load(graph, load_external_data=False)
    found = errors(fits(loaded, TARGETS[origin.target], submodel, read=outputs))
    return [each.what for each in found]
