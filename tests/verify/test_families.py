"""What is verified of a family beside Stable Diffusion 1.x: its own submodels, in float16 too."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sdflow.config import load_workflow
from sdflow.config.workflow import VerifySpec
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.store import Cache
from sdflow.verify import Verification, subject_of_folder, verify
from tests.support.small_workflows import Events

pytestmark = pytest.mark.usefixtures("forked_workers")
TO_FLOAT16 = [{"pass": "OnnxConversion", "target_opset": 17}, {"pass": "OnnxFloatToFloat16"}]


def verified(tmp_path: Path, content: dict[str, object], *submodels: str) -> Verification:
    path = tmp_path / "small.yaml"
    passes = {name: {"passes": TO_FLOAT16} for name in submodels}
    path.write_text(yaml.safe_dump({**content, "submodels": passes, "evaluate": {"image": None, "latency": None}}))
    cache = Cache(tmp_path / "cache")
    options = RunOptions(out=tmp_path / "pipelines", results=tmp_path / "results", verify=False)
    run_workflow(load_workflow(path, catalog=registry.catalog()), cache, options, Events())
    return verify(subject_of_folder(tmp_path / "pipelines/small", cache), VerifySpec(), cache).result


def test_the_text_encoders_of_sdxl_pass_in_float16(tmp_path: Path) -> None:
    """The whole text's embedding is read at the end token, whose id float16 does not tell from the one before it."""
    content: dict[str, object] = {"model": "synthetic:sdxl-tiny", "target": "cuda"}
    result = verified(tmp_path, content, "text_encoder", "text_encoder_2")
    assert result.passed, result.failure()
    outputs = [output.name for output in result.submodels["text_encoder_2"].outputs]
    assert outputs == ["text_embeds", "last_hidden_state", "hidden_states.0", "hidden_states.1", "hidden_states.2"]


@pytest.mark.slow
def test_a_float16_pipeline_of_sdxl_passes_and_draws(tmp_path: Path) -> None:
    content: dict[str, object] = {"model": "synthetic:sdxl-tiny", "target": "cuda"}
    result = verified(tmp_path, content, "text_encoder", "text_encoder_2", "unet", "vae_decoder", "vae_encoder")
    assert result.passed, result.failure()
    assert result.image is not None
    assert {part.precision for part in result.submodels.values()} == {"float16"}
