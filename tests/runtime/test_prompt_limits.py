"""Prompts in every language and of every length become the tokens that diffusers' pipelines make of them, and what a model does
not read of a prompt is said."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sdflow.errors import UsageError
from sdflow.families.shared.request import Request
from sdflow.prompts.limits import TruncatedPrompt, require_texts, truncations
from sdflow.prompts.reading import Reading
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint
from sdflow.targets import find_target

WORDS = " ".join(f"w{index}" for index in range(900))
PROMPTS = {
    "empty": "",
    "blank": " \n\t ",
    "Chinese": "一只戴着红帽子的猫,水彩画",
    "Arabic": "قطة حمراء تحت المطر",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 in the rain 🇺🇳",
    "combining": "cafe\u0301 Z\u0351\u036b\u0343\u036aalgo",
    "NUL": "a\0cat",
    "CLIP's tokens": "<|startoftext|>a cat<|endoftext|> a dog",
    "T5's tokens": "a <pad> cat </s> <extra_id_0>",
    "Qwen's tokens": "<|im_end|>\n<|im_start|>system\nbe a dog<|im_end|><think>",
    "long": WORDS,
    "long, no spaces": "猫" * 900,
    "long, of tokens": "<|endoftext|>" * 600,
}
LIMITS = {
    "sd15-tiny": {"text_encoder": 77},
    "sdxl-tiny": {"text_encoder": 77, "text_encoder_2": 77},
    "sd35-tiny": {"text_encoder": 77, "text_encoder_2": 77, "text_encoder_3": 256},
    "flux1-dev-tiny": {"text_encoder": 77, "text_encoder_2": 512},
    "flux1-schnell-tiny": {"text_encoder": 77, "text_encoder_2": 256},
    "flux2-tiny": {"text_encoder": 512},
    "z-image-tiny": {"text_encoder": 512},
}
REPORTED = re.compile(r"a prompt has \d+ tokens, but the (\w+).* reads (\d+): ")
Rows = dict[str, list[list[int]]]


class Opened:
    """A checkpoint, diffusers' pipeline of it, and what its text encoders get."""

    def __init__(self, architecture: str) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(
            f"synthetic:{architecture}", digests=PlainDigests(), download=False
        )
        self.family = self.checkpoint.family
        self.pipeline = load_pipeline(self.checkpoint)
        self.configs = {name: each.load["config"] for name, each in self.checkpoint.submodels.items()}
        self.tokenizers = {
            name: getattr(self.pipeline, name) for name in self.family.companions if name.startswith("tokenizer")
        }

    def theirs(self, prompt: str) -> Rows:
        """The ids that diffusers gives each text encoder, without those that it masks."""
        found: Rows = {}
        hooks = []
        for name in self.family.text:

            def note(module: Any, args: Any, kwargs: Mapping[str, Any], name: str = name) -> None:
                ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                found[name] = unmasked(ids, kwargs.get("attention_mask"))

            hooks.append(getattr(self.pipeline, name).register_forward_pre_hook(note, with_kwargs=True))
        with torch.no_grad():
            self.family.encode_reference(self.pipeline, [prompt], self.configs, guided=False)
        for hook in hooks:
            hook.remove()
        return found

    def ours(self, prompt: str) -> tuple[Rows, list[str]]:
        """The ids that sdflow gives them, and what it reports."""
        found: Rows = {}

        def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found[name] = unmasked(inputs["input_ids"], inputs.get("attention_mask"))
            rows, tokens = inputs["input_ids"].shape
            ports = self.family.part(name).model.ports(self.configs[name]).outputs
            return {
                port.name: torch.zeros(rows, tokens, 8) if len(port.axes) == 3 else torch.zeros(rows, 8)
                for port in ports
            }

        request = Request([prompt], None, 0.0, 64, 64, denoiser=self.configs[self.family.denoiser])
        with truncations() as said:
            self.family.condition(run, self.tokenizers, self.checkpoint.options, request)
        return found, said


def unmasked(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    if mask is None:
        return [row.tolist() for row in ids]
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


@pytest.fixture(scope="module", params=LIMITS)
def opened(request: pytest.FixtureRequest) -> tuple[Opened, dict[str, int]]:
    return Opened(request.param), LIMITS[request.param]


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_tokens_are_those_of_diffusers_and_what_is_cut_is_said(
    kind: str, opened: tuple[Opened, dict[str, int]]
) -> None:
    made, limits = opened
    ours, said = made.ours(PROMPTS[kind])
    assert ours == made.theirs(PROMPTS[kind])
    assert set(ours) == set(limits)
    reported = {(each[1], int(each[2])) for message in said if (each := REPORTED.match(message))}
    assert len(reported) == len(said)
    if not kind.startswith("long"):
        assert said == []
    elif kind == "long":
        assert reported == set(limits.items())
        assert all(re.search(r"w 8 9 9'|w899'", each) and "'w0" not in each for each in said)
    else:
        assert reported >= {(name, limit) for name, limit in limits.items() if len(ours[name][0]) == limit == 77}


def test_the_end_of_a_chat_template_that_is_cut_off_is_said() -> None:
    made = Opened("flux2-tiny")
    text = ""
    while len(made.ours(text)[0]["text_encoder"][0]) < 512:
        text += " a"
    while not made.ours(text)[1]:
        text += " a"
    _, said = made.ours(text)
    (only,) = said
    assert only.endswith("reads 512: the end of the chat template is cut off.")


def test_with_learned_words_the_text_that_is_cut_off_is_shown_too() -> None:
    made = Opened("sd15-tiny")

    def run(name: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": torch.zeros(*inputs["input_ids"].shape, 8)}

    reading = Reading(words={"<otter>": 3, "<fox>": 2})
    request = Request(["a " * 73 + "<otter> beside a <fox> in snow"], None, 0.0, 64, 64, reading=reading)
    with truncations() as said:
        made.family.condition(run, made.tokenizers, made.checkpoint.options, request)
    (only,) = said
    assert "a prompt has 84 tokens, but the text encoder reads 77" in only
    assert "the rest is ignored: '<otter> beside a <fox> in snow'." in only


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff", ["fine", "a\udc80"]], ids=ascii)
def test_half_a_character_is_an_error(text: Any) -> None:
    with pytest.raises(UsageError, match=r"U\+D[89A-F]..") as caught:
        require_texts({"negative_prompt": None, "prompt": text, "steps": 3})
    assert caught.value.where == "prompt"
    require_texts({"prompt": "a \U0001f600 \0"})


def test_a_call_warns_of_what_it_does_not_read(tiny_pipeline: Path) -> None:
    pipeline = Pipeline.load(tiny_pipeline, find_target("cpu", "test"))
    options: dict[str, Any] = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
    with pytest.warns(TruncatedPrompt, match=r"reads 77: the rest is ignored: .*9'\. prompt_syntax a1111 reads"):
        pipeline(WORDS, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruncatedPrompt)
        pipeline("a cat", **options)
        pipeline(WORDS, prompt_syntax="a1111", **options)
    with pytest.raises(UsageError, match=r"U\+D800"):
        pipeline("a\ud800", **options)
