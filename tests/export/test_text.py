"""`--text`: strings go in. The ids within the graph are those of transformers' tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.export.builder import EXTENSIONS, EXTENSIONS_VERSION, Builder
from sdflow.export.one_file import Wanted, export_one_file
from sdflow.export.program_data import clip_table
from sdflow.export.tokenizer import add_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = [
    "", "a horse on the moon", "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß ÀÉ", "日本語 の 絵", "a_b c-d 12,345.67",
    "we'll they've I'd don't 'quoted'", "emoji 🐎🌕 and ½ ² Ⅷ", "tab\tnew\nline", "x" * 300, "word " * 100, "!'s '!!'",
    "! " * 90, "word " * 75, "word " * 74 + "! !", "A RED Circle",
]  # fmt: skip


def session(model: onnx.ModelProto | Path) -> Any:
    with (
        pytest.MonkeyPatch.context() as patched
    ):  # importing it chooses another protobuf for processes that start later
        patched.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "upb")
        extensions = pytest.importorskip("onnxruntime_extensions", reason="pip install sdflow[export-text]")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if isinstance(
        model, Path
    ):  # to optimize a whole pipeline takes longer than to run it; test_one_file.py does so once
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(extensions.get_library_path())
    what = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(what, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("pad", [None, "!"], ids=["as it is", "as of SDXL's second"])
@pytest.mark.parametrize("source", ["tiny", "shapes"])
def test_the_ids_are_those_of_transformers(source: str, pad: str | None, tiny_pipeline: Path) -> None:
    from transformers import CLIPTokenizer

    folder = tiny_pipeline / "tokenizer" if source == "tiny" else ROOT / "samples/shapes/tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(folder, **({} if pad is None else {"pad_token": pad}))
    graph = Builder("text")
    ids = add_tokenizer(graph, "texts", clip_table(tokenizer, "tokenizer"))
    made = helper.make_graph(
        graph.nodes,
        "text",
        [helper.make_tensor_value_info("texts", TensorProto.STRING, ["texts"])],
        [helper.make_tensor_value_info(ids, TensorProto.INT64, ["texts", "tokens"])],
        graph.initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(EXTENSIONS, EXTENSIONS_VERSION)]
    (found,) = session(helper.make_model(made, opset_imports=opsets, ir_version=8)).run(None, {"texts": TEXTS})
    options = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    for text, row in zip(TEXTS, found, strict=True):
        if pad == "!" and "!'s" in text:  # the page tells of it
            continue
        assert row.tolist() == tokenizer(text, **options).input_ids, text


def test_a_graph_with_text_draws_what_one_with_ids_draws(tiny_pipeline: Path, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    options = {"padding": "max_length", "max_length": 77, "return_tensors": "np"}
    latents = np.random.default_rng(1).standard_normal((1, 4, 8, 8), np.float32)
    feeds = {"latents": latents, "guidance_scale": np.array([7.5], np.float32)}
    drawn = []
    for text in (True, False):
        made = export_one_file(tiny_pipeline, tmp_path / "one.onnx", Wanted(steps=2, checker=False, text=text))
        names = {"prompt": "a horse", "negative_prompt": "blurry"}
        if text:
            assert made.inputs[:2] == ("prompt string (images)", "negative_prompt string (images)")
            texts: dict[str, Any] = {name: np.array([value], object) for name, value in names.items()}
        else:
            texts = {
                name.replace("prompt", "input_ids"): np.asarray(tokenizer(value, **options).input_ids, np.int32)
                for name, value in names.items()
            }
        drawn.append(session(tmp_path / "one.onnx").run(None, {**feeds, **texts})[0])
    assert drawn[0].std() > 0.1
    np.testing.assert_array_equal(*drawn)
