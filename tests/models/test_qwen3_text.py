"""Qwen3's graph gives the hidden states that transformers' own class gives, for any length and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

import sdflow.families
from sdflow.models.qwen3_text import LAYERS, Qwen3Text, qwen3_parameters
from sdflow.passes.tracing import traced_module, weights_kept_apart

CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 300,
}
TOKENIZER = Path(sdflow.families.__file__).parent / "flux2/architectures/flux2-klein-4b/tokenizer"
TOLERANCE = 2e-5
"""Of hidden states whose values are near 1."""


@pytest.fixture(scope="module")
def original() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(Qwen3Config.from_dict(CONFIG)).eval()
    for name, tensor in module.named_parameters():
        if tensor.dim() == 1:  # weights of norms are ones at first
            torch.nn.init.normal_(tensor, 1.0, 0.2)
        elif "embed" not in name:
            torch.nn.init.normal_(tensor, 0.0, 0.15)
    return module


def expected(original: Qwen3ForCausalLM, ids: Any, mask: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        states: tuple[torch.Tensor, ...] = original(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        ).hidden_states
    return states


@pytest.mark.parametrize("layers", [[1, 3, 4], [-2], [5], None])
def test_the_graph_gives_the_states_of_the_library(
    original: Qwen3ForCausalLM, layers: list[int] | None, tmp_path: Path
) -> None:
    """Of layers by number and from the end, the normalized last one, and what a config without a choice means."""
    model = Qwen3Text()
    config = CONFIG if layers is None else {**CONFIG, LAYERS: layers}
    module = model.empty(config)
    module.load_state_dict(original.model.state_dict())
    ports = model.ports(config)
    file = str(tmp_path / "model.onnx")
    dummy = tuple(torch.from_numpy(each) for each in model.dummy(config, model.smallest(config)).values())
    with weights_kept_apart():
        torch.onnx.export(
            traced_module(model, module),
            dummy,
            file,
            dynamo=False,
            opset_version=17,
            input_names=[port.name for port in ports.inputs],
            output_names=[port.name for port in ports.outputs],
            dynamic_axes=ports.dynamic_axes,
        )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch, length in ((1, 1), (1, 7), (3, 32)):
        ids = torch.randint(0, 300, (batch, length))
        mask = (torch.arange(length)[None] < torch.tensor([length, max(1, length // 3), 1])[:batch, None]).long()
        states = expected(original, ids, mask)
        given = {"input_ids": ids.int().numpy(), "attention_mask": mask.int().numpy()}
        found = session.run(None, given)
        wanted = [states[index] for index in layers or [-1]]
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert theirs.std() > 0.1
            assert np.abs(mine - theirs.numpy()).max() < TOLERANCE


def test_layers_above_the_last_chosen_one_are_not_in_the_graph(original: Qwen3ForCausalLM) -> None:
    module = Qwen3Text().empty({**CONFIG, LAYERS: [1, 3]})
    module.load_state_dict(original.model.state_dict())
    kept = traced_module(Qwen3Text(), module).state_dict()
    assert {name.split(".")[1] for name in kept if name.startswith("layers.")} == {"0", "1", "2"}
    assert "norm.weight" not in kept


def test_names_and_shapes_are_those_of_the_class(original: Qwen3ForCausalLM) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in Qwen3Model(original.config).state_dict().items()}
    assert qwen3_parameters(CONFIG) == shapes
    model = Qwen3Text()
    named = {model.current_name(name) for name in original.state_dict()}
    assert {name for name in named if not model.unused(name, shapes)} == set(shapes)


def test_the_stand_in_tokenizer_knows_the_chat() -> None:
    """The same text as Qwen3's own template makes of one message, and every character of it."""
    tokenizer = Qwen2TokenizerFast.from_pretrained(TOKENIZER)
    prompt = "ein Füchslein 狐 <b>"
    messages = [{"role": "user", "content": prompt}]
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, enable_thinking=False, **options)
    begin = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{begin}<think>\n\n</think>\n\n"
    assert tokenizer.apply_chat_template(messages, enable_thinking=True, **options) == begin
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and max(ids) < 300
