"""Recording changes nothing for tensors that are no stubs, ends when it ends, and misses no look at a weight."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest

from sdflow.errors import WeightValueRead
from sdflow.onnx_model.stub import is_stub
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.weights.faster_fusion import faster_fusion
from sdflow.weights.recipe import Param
from sdflow.weights.recording import recording
from sdflow.weights.stubs import is_recording, make_stub, stub_recipe
from sdflow.weights.symbol import Symbol
from tests.weights.conftest import chain


def stub(name: str = "w") -> object:
    tensor = onnx.TensorProto(name=name)
    make_stub(tensor, Param(name, (2, 3)))
    return tensor


def test_a_stub_reads_as_a_symbol_and_real_tensors_as_arrays() -> None:
    from onnx import numpy_helper

    real = numpy_helper.from_array(np.arange(3), "r")
    with recording():
        assert type(numpy_helper.to_array(stub())) is Symbol
        np.testing.assert_array_equal(numpy_helper.to_array(real), np.arange(3))
        assert not is_stub(numpy_helper.from_array(np.arange(3), "r"))
        moved = numpy_helper.from_array(numpy_helper.to_array(stub()).T, "moved")
    assert is_stub(moved)
    assert stub_recipe(moved).shape == tuple(moved.dims) == (3, 2)


def test_a_look_at_a_weight_is_reported_even_if_someone_swallows_it() -> None:
    from onnx import numpy_helper

    swallow = contextlib.suppress(Exception)  # as shape inference in onnxruntime.transformers does
    with pytest.raises(WeightValueRead, match="reads the values of w"), recording(), swallow:
        np.abs(numpy_helper.to_array(stub()))


def test_everything_is_as_before_afterwards() -> None:
    import onnx
    import sympy
    import torch
    from onnxruntime.transformers import float16, fusion_base, onnx_model

    places = [
        (onnx.numpy_helper, "to_array"),
        (onnx.numpy_helper, "from_array"),
        (onnx.external_data_helper, "load_external_data_for_tensor"),
        (torch.onnx, "export"),
        (float16, "convert_tensor_float_to_float16"),
        (fusion_base.Fusion, "add_initializer"),
        (onnx_model.OnnxModel, "input_name_to_nodes"),
        (onnx_model.OnnxModel, "get_parent"),
        (sympy, "simplify"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    with pytest.raises(KeyError), recording(), faster_fusion():
        assert is_recording()
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(places, before, strict=True))
        raise KeyError
    assert not is_recording()
    assert [getattr(owner, name) for owner, name in places] == before


def test_the_workflows_chains_run_without_weights() -> None:
    assert why_weights_are_carried(chain("unet", "cuda")) is None
    assert why_weights_are_carried(chain("vae_decoder", "cpu")) is None


def test_other_chains_carry_their_weights_and_say_why() -> None:
    conversion, merge, fuse, half = chain("unet", "cuda")

    class Own(fuse.implementation):  # type: ignore[name-defined,misc]
        name = "MyPass"

    for steps, reason in (
        ([], "does not begin with a pass that exports"),
        ([fuse, half], "does not begin with a pass that exports"),
        ([conversion, fuse, merge], "LoraMerge is not right after OnnxConversion"),
        ([conversion, ChainStep(Own, {}), half], "MyPass may look at the weights"),
        ([conversion, ChainStep(fuse.implementation, {**fuse.config, "opt_level": 1})], "opt_level 1"),
    ):
        assert reason in str(why_weights_are_carried(steps))
