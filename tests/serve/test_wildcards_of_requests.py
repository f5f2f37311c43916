"""Wildcards in requests: each image gets lines by its own seed, and what cannot be resolved is the client's mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.prompts.wildcards import Wildcards
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import Generation
from sdflow.serve.http.requested import jobs_of
from sdflow.serve.http.served_model import read_served
from sdflow.serve.limits import Limits


def test_each_image_has_the_lines_of_its_seed(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "color.txt").write_text("red\nblue\ngreen\n")
    wildcards, model = Wildcards(tmp_path), read_served(tiny_pipeline, check=False)

    def jobs(prompt: str, given: Wildcards | None = wildcards, **more: object) -> list[tuple[str, str | None, int]]:
        fields = Generation.model_validate({"prompt": prompt, "n": 3, "seed": 2**63 - 2, **more})
        found = jobs_of(fields, model, Limits(), None, None, None, wildcards=given)
        return [(job.prompt, job.negative_prompt, job.seed) for job in found]

    text = "a __color__ circle"
    seeds = [2**63 - 2, 2**63 - 1, 0]
    assert jobs(text, negative_prompt="__color__") == [
        (wildcards.resolve(text, seed), wildcards.resolve("__color__", seed), seed) for seed in seeds
    ]
    assert jobs(text, None) == [(text, None, seed) for seed in seeds]
    with pytest.raises(ApiError, match=r"__colour__: there is no colour\.txt") as refused:
        jobs("a __colour__ circle")
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    (tmp_path / "many.txt").write_text("a BREAK b BREAK c\n")
    fields = Generation.model_validate({"prompt": "__many__", "steps": 1, "prompt_syntax": "a1111"})
    side = model.latents.image_size
    with pytest.raises(ApiError, match="3 prompt sections") as refused:
        jobs_of(fields, model, Limits(cost=2.5 * side**2 / 1e6), None, None, None, wildcards=wildcards)
    assert refused.value.code == "too_costly"
    (tmp_path / "long.txt").write_text("word " * 20_000)
    with pytest.raises(ApiError, match="prompt"):
        jobs("__long__")
