"""What each family's small workflow builds for each target, that target's provider has kernels for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from shell import ROOT, Shell

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
        "tiny_cpu", "sdxl_tiny_cpu", "sdxl_refiner_tiny_cpu",
        "tiny_ip_adapter_cpu", "tiny_controlnet_cpu", "sd21_tiny_cpu", "sd_turbo_tiny_cpu", "lcm_tiny_cpu",
        "sd15_inpainting_tiny_cpu", "sd15_taesd_tiny_cpu", "sdxl_tiny_ip_adapter_cpu", "sdxl_tiny_controlnet_cpu",
        "sdxl_turbo_tiny_cpu", "lcm_sdxl_tiny_cpu", "sdxl_with_refiner_tiny_cpu",
    ],
)  # fmt: skip
def test_a_family_fits_every_target(shell: Shell, workflow: str) -> None:
    targets = [word for name in TARGETS for word in ("--target", name)]
    path = str(ROOT / f"workflows/{workflow}.yaml")
    built = shell.json("run", path, "--no-verify", "--no-evaluate", *targets)["pipelines"]
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
