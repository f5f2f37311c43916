"""SeparateQkv gives what the packed attentions gave, for those that are narrow enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.separate_qkv import SeparateQkv, SeparateQkvConfig
from sdflow.verify.lowering import lower, session_of


def separate(fused_unet: Any, out: Path, widest: int) -> Any:
    out.mkdir()
    return SeparateQkv().run(PassInputs("unet", fused_unet.path, {}), out, SeparateQkvConfig(widest=widest))


def packed(path: Path) -> tuple[int, int]:
    """Self-attentions that are packed, and all attentions with three inputs."""
    model = onnx.load(str(path / "model.onnx"), load_external_data=False)
    inputs = [len(node.input) for node in model.graph.node if node.op_type == "MultiHeadAttention"]
    return inputs.count(1), inputs.count(3)


@pytest.mark.parametrize("widest", [32, 64])
def test_a_unet_gives_what_it_gave(fused_unet: Any, tiny_unet: Any, tmp_path: Path, widest: int) -> None:
    out = tmp_path / "out"
    facts = separate(fused_unet, out, widest)
    before, after = packed(fused_unet.path), packed(out)
    assert facts["separated"] == before[0] - after[0] == after[1] - before[1] > 0
    assert (after[0] == 0) == (widest == 64)  # the middle block has 64 channels
    old, new = (
        session_of(lower(onnx.load(str(path / "model.onnx"), load_external_data=False)), path, threads=1).run(
            None, tiny_unet.feeds
        )[0]
        for path in (fused_unet.path, out)
    )
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())


def test_a_model_without_such_attentions_is_an_error(fused_unet: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="no packed self-attention of at most 16 channels"):
        separate(fused_unet, tmp_path / "out", 16)
