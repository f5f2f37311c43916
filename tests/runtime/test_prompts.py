"""Prompts as people write them, through the exported text encoders: long ones, weights, learned words, CLIP skip.

Held to compel and diffusion-prompt-embedder, to diffusers' pipelines, and to the last step of A1111's emphasis (the mean
restored, modules/sd_emphasis.py of stable-diffusion-webui 1.10), which neither package has, written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import pytest
import torch
import transformers
from compel import Compel, ReturnedEmbeddingsType
from compel.embeddings_provider import SplitLongTextMode
from diffusion_prompt_embedder.clip.tokenization import get_prompts_tokens_with_weights, group_tokens_and_weights
from diffusion_prompt_embedder.core.embedding import encode_prompt_chunks_batched
from safetensors.torch import save_file

from sdflow.errors import CheckpointError, UsageError
from sdflow.families.shared.request import Request
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16, OnnxFloatToFloat16Config
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.passes.ort_transformers_optimization import OrtTransformersOptimization, OrtTransformersOptimizationConfig
from sdflow.prompts.reading import Reading
from sdflow.runtime.drawing.text import leave_out_layers, run_rows, with_words, without_last_layers
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.embedding import Embedding, read_embedding, split_word
from sdflow.targets import TARGETS

TOLERANCE = 1e-4
ARCHITECTURES = ("sd15-tiny", "sd21-tiny", "sdxl-tiny")
LONG = " ".join(["a horse on the moon with seven shining golden crowns"] * 12)  # 120 tokens, no comma
WEIGHTED = "a (horse:1.4) on the [moon], ((golden)) crowns (in:0.3) a \\(small\\) world"
SIZE = 64


class Texts:
    """The text encoders of an architecture, exported and fused for the CPU, and diffusers' pipeline of the same weights."""

    def __init__(self, architecture: str, root: Path) -> None:
        checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
        self.architecture = architecture
        self.family, self.options = checkpoint.family, checkpoint.options
        self.torch = load_pipeline(checkpoint)
        self.torch.set_progress_bar_config(disable=True)
        self.companions = {name: getattr(self.torch, name) for name in checkpoint.companions}
        self.plain, self.fused = root / "plain", root / "fused"
        for name in self.family.text:
            for folder in (self.plain, self.fused):
                (folder / name).mkdir(parents=True)
            inputs = PassInputs(name, None, checkpoint.submodels[name].load, self.family.name)
            OnnxConversion().run(inputs, self.plain / name, OnnxConversionConfig())
            fusing = OrtTransformersOptimizationConfig(model_type="clip", opt_level=0, float16=False)
            inputs = PassInputs(name, self.plain / name, {}, self.family.name)
            OrtTransformersOptimization().run(inputs, self.fused / name, fusing)

    def condition(
        self,
        prompt: str,
        negative: str | None = None,
        *,
        syntax: str = "a1111",
        clip_skip: int = 0,
        words: Sequence[Embedding] = (),
        folder: Path | None = None,
    ) -> dict[str, torch.Tensor]:
        reading = Reading(syntax, {word.word: word.count for word in words})
        negatives = None if negative is None else [negative]
        request = Request([prompt], negatives, 1.0 if negative is None else 7.5, SIZE, SIZE, reading=reading)

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            submodel = load_submodel(folder or self.fused, name, TARGETS["cpu"], family=self.family, lazy=True)
            submodel = with_words(submodel, self.family, words)
            return run_rows(without_last_layers(submodel, clip_skip), inputs)

        found = self.family.condition(run, self.companions, self.options, request)
        return dict(found.inputs)

    def hidden(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.condition(*args, **options)["encoder_hidden_states"]

    def encoders(self) -> Iterator[tuple[Any, Any]]:
        for suffix in ("", "_2"):
            if hasattr(self.torch, f"tokenizer{suffix}"):
                yield getattr(self.torch, f"tokenizer{suffix}"), getattr(self.torch, f"text_encoder{suffix}")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Texts]:
    return cache(lambda architecture: Texts(architecture, tmp_path_factory.mktemp("texts")))


@pytest.fixture(params=ARCHITECTURES)
def texts(request: pytest.FixtureRequest, build: Callable[[str], Texts]) -> Texts:
    return build(request.param)


@pytest.fixture
def sd15(build: Callable[[str], Texts]) -> Texts:
    return build("sd15-tiny")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    difference = (found - expected).abs().max()
    assert difference <= TOLERANCE, f"largest difference {difference}"


@torch.no_grad()
def test_a_long_prompt_without_marks_is_encoded_as_compel_encodes_it(texts: Texts) -> None:
    two = len(list(texts.encoders())) == 2
    kind = "PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED" if two else "LAST_HIDDEN_STATES_NORMALIZED"
    expected = [
        Compel(
            tokenizer,
            encoder,
            truncate_long_prompts=False,
            returned_embeddings_type=ReturnedEmbeddingsType[kind],
            split_long_text_mode=SplitLongTextMode.BRUTAL,
        )(LONG)
        for tokenizer, encoder in texts.encoders()
    ]
    found = texts.hidden(LONG)
    assert found.shape[1] == 2 * 77
    assert_close(found, torch.cat(expected, dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("clip_skip", [0, 1])
@pytest.mark.parametrize("prompt", [WEIGHTED, f"{WEIGHTED} {LONG} [{LONG}]"], ids=["short", "long"])
def test_weights_are_those_of_the_package_with_the_mean_restored(sd15: Texts, prompt: str, clip_skip: int) -> None:
    tokenizer, encoder = next(sd15.encoders())
    ids, weights = group_tokens_and_weights(*get_prompts_tokens_with_weights(tokenizer, prompt))
    ones = [[1.0] * len(row) for row in weights]
    device, skip = torch.device("cpu"), clip_skip + 1  # the package counts as A1111's webui
    weighted, before = (
        encode_prompt_chunks_batched(encoder, [ids], [each], device, torch.float32, skip) for each in (weights, ones)
    )
    chunks = []
    for now, then in zip(weighted.split(77, dim=1), before.split(77, dim=1), strict=True):
        chunks.append(now * (then.mean() / now.mean()))
    found = sd15.hidden(prompt, clip_skip=clip_skip)
    assert_close(found, torch.cat(chunks, dim=1))
    assert (weighted - before).abs().max() > 100 * TOLERANCE, "the weights change nothing"


@torch.no_grad()
def test_the_shorter_of_prompt_and_negative_is_filled_with_empty_chunks(texts: Texts) -> None:
    found = texts.hidden(LONG, "blurry")
    assert found.shape[:2] == (2, 2 * 77)
    negative, positive = found[:1], found[1:]
    assert_close(positive, texts.hidden(LONG))
    assert_close(negative, torch.cat([texts.hidden("blurry"), texts.hidden("")], dim=1))


@torch.no_grad()
def test_break_begins_a_chunk(texts: Texts) -> None:
    assert_close(
        texts.hidden("a horse BREAK a moon"), torch.cat([texts.hidden("a horse"), texts.hidden("a moon")], dim=1)
    )


def test_the_text_as_a_whole_is_that_of_the_first_chunk(build: Callable[[str], Texts]) -> None:
    both, first = (build("sdxl-tiny").condition(prompt) for prompt in ("a horse BREAK a moon", "a horse"))
    assert_close(both["text_embeds"], first["text_embeds"])


def test_a_plain_prompt_stays_as_diffusers_reads_it(texts: Texts) -> None:
    found = texts.hidden(WEIGHTED, syntax="plain")
    expected, *_ = texts.torch.encode_prompt(
        WEIGHTED, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    assert_close(found, expected)


@pytest.mark.parametrize("form", ["plain", "fused"])
def test_clip_skip_equals_diffusers(texts: Texts, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # diffusers 0.42 still looks for the part that transformers 5 made the whole.
    monkeypatch.setattr(transformers.CLIPTextModel, "text_model", property(lambda self: self), raising=False)
    folder: Path = getattr(texts, form)
    options = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    expected, *_ = texts.torch.encode_prompt("a horse", clip_skip=1, **options)
    whole, *_ = texts.torch.encode_prompt("a horse", **options)
    assert_close(texts.hidden("a horse", syntax="plain", clip_skip=1, folder=folder), expected)
    assert (whole - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("count", [-1, 2])
def test_layers_that_are_not_there_cannot_be_left_out(sd15: Texts, count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} of 2 layers of the text encoder cannot be skipped"):
        sd15.hidden("a horse", clip_skip=count)


def test_layers_are_left_out_of_a_float16_graph_too(sd15: Texts, tmp_path: Path) -> None:
    inputs = PassInputs("text_encoder", sd15.fused / "text_encoder", {}, sd15.family.name)
    OnnxFloatToFloat16().run(inputs, tmp_path, OnnxFloatToFloat16Config())
    model = onnx.load(str(tmp_path / "model.onnx"))
    leave_out_layers(model, 1, {"num_hidden_layers": 2})
    (norm,) = [node for node in model.graph.node if node.name == "last_norm_of_fewer_layers"]
    last = next(node for node in model.graph.node if node.output[0] == "last_norm_of_all_layers")
    assert list(norm.input[2:4]) == list(last.input[2:4])


def test_a_graph_with_other_norms_is_refused(sd15: Texts) -> None:
    model = onnx.load(str(sd15.fused / "text_encoder" / "model.onnx"))
    with pytest.raises(UsageError, match="has 5 norms, but 3 layers have 7"):
        leave_out_layers(model, 1, {"num_hidden_layers": 3})


# Learned words


@pytest.fixture
def vectors(texts: Texts) -> dict[str, torch.Tensor]:
    """Three vectors for each text encoder, by the name of its tensor in a file."""
    random = torch.Generator().manual_seed(5)
    names = [texts.family.part(name).embedding or "emb_params" for name in texts.family.text]
    return {
        name: torch.randn((3, encoder.config.hidden_size), generator=random)
        for name, (_, encoder) in zip(names, texts.encoders(), strict=True)
    }


def test_learned_words_are_encoded_as_diffusers_encodes_them(
    texts: Texts, vectors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(vectors, tmp_path / "my-style.safetensors")
    word = read_embedding(tmp_path / "my-style.safetensors")
    prompt, negative = "a horse in my-style, golden", "My-Style blurry"
    found = texts.condition(prompt, negative, syntax="plain", words=[word])

    theirs = load_pipeline(open_checkpoint(f"synthetic:{texts.architecture}", digests=PlainDigests(), download=False))
    for suffix, rows in zip(("", "_2"), vectors.values(), strict=False):
        tokenizer, encoder = getattr(theirs, f"tokenizer{suffix}"), getattr(theirs, f"text_encoder{suffix}")
        # With 2 transformers takes the largest id for the end, and the new ones are larger.
        for module in encoder.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = tokenizer.eos_token_id
        encoder.config.eos_token_id = tokenizer.eos_token_id
        theirs.load_textual_inversion({"my-style": rows}, "my-style", tokenizer=tokenizer, text_encoder=encoder)
    encoded = theirs.encode_prompt(
        prompt,
        device="cpu",
        num_images_per_prompt=1,
        do_classifier_free_guidance=True,
        negative_prompt=negative.lower(),
    )
    assert_close(found["encoder_hidden_states"], torch.cat([encoded[1], encoded[0]]))
    if "text_embeds" in found:
        assert_close(found["text_embeds"], torch.cat([encoded[3], encoded[2]]))


@torch.no_grad()
def test_a_learned_word_weighs_as_any_other(sd15: Texts, tmp_path: Path) -> None:
    """Vectors that are those of a word in the vocabulary: the prompt with that word is the reference."""
    tokenizer, encoder = next(sd15.encoders())
    (token,) = tokenizer("golden", add_special_tokens=False).input_ids
    table = encoder.get_input_embeddings().weight
    save_file({"emb_params": table[token].detach().clone()[None]}, tmp_path / "zzz.safetensors")
    word = read_embedding(tmp_path / "zzz.safetensors")
    found = sd15.hidden(f"a (zzz:1.4) horse {LONG}, zzz", words=[word])
    assert_close(found, sd15.hidden(f"a (golden:1.4) horse {LONG}, golden"))


def test_vectors_of_another_model_are_refused(sd15: Texts, tmp_path: Path) -> None:
    save_file({"emb_params": torch.ones(2, 48)}, tmp_path / "x.safetensors")
    with pytest.raises(
        UsageError, match="holds emb_params 48 wide; this pipeline's text encoder reads vectors 32 wide"
    ):
        sd15.hidden("x", words=[read_embedding(tmp_path / "x.safetensors")])
    save_file({"clip_l": torch.ones(2, 32), "clip_g": torch.ones(2, 32)}, tmp_path / "xl.safetensors")
    with pytest.raises(UsageError, match="its text encoders emb_params"):
        sd15.hidden("xl", words=[read_embedding(tmp_path / "xl.safetensors")])


FILES = {
    "kohya.safetensors": {"emb_params": torch.ones(2, 8)},
    "learned_embeds.safetensors": {"<cat-toy>": torch.ones(8)},
    "xl.safetensors": {"clip_l": torch.ones(2, 8), "clip_g": torch.ones(2, 16)},
    "webui.pt": {"string_to_token": {"*": 265}, "string_to_param": {"*": torch.ones(2, 8)}, "name": "x", "step": 1},
    "learned_embeds.bin": {"<cat-toy>": torch.ones(8)},
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(FILES[name], path)
    else:
        torch.save(FILES[name], path)
        with pytest.raises(CheckpointError, match="is pickled"):
            read_embedding(path)
    word = read_embedding(path, allow_pickle=True)
    assert word.word == ("<cat-toy>" if "learned" in name else path.stem)
    assert word.count == (1 if "learned" in name else 2)
    assert all(rows.dtype == np.float32 and (rows == 1).all() for rows in word.tensors.values())
    assert read_embedding(path, "other", allow_pickle=True).word == "other"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": torch.ones(2, 8), "b": torch.ones(2, 8)}, "holds 2 tensors"),
        ({"emb_params": torch.full((2, 8), float("nan"))}, "values that are not finite"),
        ({"emb_params": torch.ones(2, 8, 1)}, "does not hold the vectors"),
        ({"emb_params": torch.ones(76, 8)}, "does not hold the vectors"),
        ({" ": torch.ones(2, 8)}, "' ' is not a word"),
        ({"clip_l": torch.ones(2, 8), "clip_g": torch.ones(3, 16)}, "more vectors for one text encoder"),
    ],
)
def test_a_file_that_is_no_embedding_is_refused(tensors: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read_embedding(tmp_path / "x.safetensors")


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x80\x04K\x01."])
def test_a_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_embedding(tmp_path / "x.pt", allow_pickle=True)


def test_a_file_and_its_word_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a:b.pt").touch()
    assert split_word("x/style.pt:word") == (Path("x/style.pt"), "word")
    assert split_word("x/style.pt") == (Path("x/style.pt"), None)
    assert split_word(str(tmp_path / "a:b.pt")) == (tmp_path / "a:b.pt", None)
    assert split_word("C:\\style.pt") == (Path("C:\\style.pt"), None)


# Whole images


@torch.no_grad()
def test_images_equal_diffusers_with_the_same_embeddings(
    tiny_pipeline: Path, tiny_torch: diffusers.StableDiffusionPipeline, sd15: Texts, tmp_path: Path
) -> None:
    save_file({"emb_params": torch.ones(2, 32)}, tmp_path / "my-style.safetensors")
    file = tmp_path / "my-style.safetensors"
    ours = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, embeddings=[file])
    prompt, negative = f"a (horse:1.4) {LONG} my-style", "my-style, [blurry]"
    words = [read_embedding(file)]
    whole, skipped = (sd15.hidden(prompt, negative, clip_skip=skip, words=words) for skip in (0, 1))
    encoded = torch.cat([whole[:1], skipped[1:]])  # diffusers reads the negative prompt with all layers
    common = {"num_inference_steps": 3, "height": SIZE, "width": SIZE, "output_type": "np"}
    latents = torch.randn(ours.latents_shape(1, SIZE, SIZE), generator=torch.Generator().manual_seed(2))
    theirs = diffusers.StableDiffusionPipeline(**{**tiny_torch.components, "safety_checker": None})
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(prompt_embeds=encoded[1:], negative_prompt_embeds=encoded[:1], latents=latents, **common).images
    options = {"negative_prompt": negative, "latents": latents, **common}
    drawn = ours(prompt, prompt_syntax="a1111", clip_skip=1, **options).images
    assert np.abs(drawn - expected).max() <= TOLERANCE
    plain = ours(prompt, **options).images
    assert np.abs(drawn - plain).max() > 10 * TOLERANCE


def test_an_unknown_syntax_is_refused(tiny_pipeline: Path) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, low_memory=True)
    with pytest.raises(UsageError, match="unknown prompt syntax 'a111'"):
        pipeline("a horse", prompt_syntax="a111")
