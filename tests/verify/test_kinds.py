"""Reports tell what is found in many places once, and lose no place."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from sdflow.report.verify import print_verification
from sdflow.verify.finding import Finding, kinds
from sdflow.verify.report.html import page
from sdflow.verify.result import Verification

REBUILD = "run the workflow again"
CUT_OFF = [
    Finding(
        "unet", "external-data", "error", f"down.{n}.weight", f"ends at byte {n * 1234:,} of model.onnx.data", REBUILD
    )
    for n in range(1, 41)
]
NO_KERNEL = [
    Finding("text_encoder", "kernel", "error", "Attention_0", "Attention has no TensorRT kernel", "leave it out", 12),
    Finding("unet", "kernel", "error", "Attention_7", "Attention has no TensorRT kernel", "leave it out", 16),
    Finding("unet", "kernel", "error", "Gelu_0", "Gelu has no TensorRT kernel", "leave it out", 16),
]
LARGE = [
    Finding("unet", "overflow", "warning", name, f"Conv gives {value:.3g} at step 3; float16 ends at 65504", f"keep [{name}]")
    for name, value in {"/up/Conv": 4e4, "/down/Conv": 5e4}.items()
]  # fmt: skip
TYPES = [
    Finding("unet", "ports", "error", "sample", f"the input is {kind}, not int32", REBUILD) for kind in ("float16", "float32")
]  # fmt: skip


def result(*findings: Finding) -> Verification:
    return Verification("small", "cpu", "quick", {}, None, None, findings)


def shown(text: str) -> str:
    """A page's text, without its tags."""
    return unescape(re.sub(r"<[^>]*>", " ", text))


@pytest.mark.parametrize(
    ("findings", "whats", "counts"),
    [
        (CUT_OFF, ["ends at byte 1,234 of model.onnx.data"], [40]),
        (NO_KERNEL, ["Attention has no TensorRT kernel", "Gelu has no TensorRT kernel"], [28, 16]),
        (TYPES, ["the input is float16, not int32", "the input is float32, not int32"], [1, 1]),
        ([*LARGE, Finding("vae", "overflow", "error", "/up/Conv", LARGE[0].what, "")], [LARGE[0].what] * 2, [2, 1]),
        ([Finding("unet", check, "error", "n", "is missing", "") for check in ("a", "b")], ["is missing"] * 2, [1, 1]),
    ],
    ids=["numbers", "operators", "types", "levels", "checks"],
)
def test_findings_are_of_a_kind_when_only_names_and_numbers_differ(
    findings: list[Finding], whats: list[str], counts: list[int]
) -> None:
    found = kinds(findings)
    assert [(kind.first.what, sum(kind.counts.values())) for kind in found] == list(zip(whats, counts, strict=True))
    assert [each for kind in found for each in kind.findings] == findings


def test_a_kind_says_where_it_is_in_each_submodel() -> None:
    attention, gelu = kinds(NO_KERNEL)
    assert attention.where == "text_encoder Attention_0 and 11 more, unet Attention_7 and 15 more"
    assert gelu.where == "unet Gelu_0 and 15 more"
    (whole,) = kinds([Finding("", "component", "error", "tokenizer", "is missing", REBUILD)])
    assert whole.where == "tokenizer"


def test_the_page_has_a_row_for_each_kind_the_gravest_first_and_every_place() -> None:
    text = page(result(*LARGE, *CUT_OFF, *NO_KERNEL), {})
    table = text[text.index("<h2>The target and the folder") : text.index("<h2>Operators")]
    rows = table.split("<tr>")[2:]
    assert [re.findall(r'class="(error|warning|note)"', row) for row in rows] == [["error"]] * 3 + [["warning"]]
    assert [row.count("<details>") for row in rows] == [1, 1, 0, 1], "one place needs no folding"
    for finding in (*LARGE, *CUT_OFF, *NO_KERNEL):
        (row,) = [row for row in rows if finding.node in shown(row)]
        for what in (finding.what, finding.remedy):
            assert what in shown(row)
    assert shown(table).count(REBUILD) == 1
    assert shown(table).count("leave it out") == 2, "said once for each kind"


def test_what_does_not_pass_and_the_text_report_say_each_kind_once(capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = result(*LARGE, *CUT_OFF, *NO_KERNEL)
    assert not found.passed
    assert [(what, remedy) for _, what, remedy in found.problems] == [
        (CUT_OFF[0].what, REBUILD),
        (NO_KERNEL[0].what, "leave it out"),
        (NO_KERNEL[2].what, "leave it out"),
    ]
    assert "unet down.1.weight and 39 more: " in found.failure()
    print_verification(found)
    printed = capsys.readouterr().out
    assert f"unet /up/Conv and 1 more: {LARGE[0].what}" in printed
    assert printed.count("Conv gives") == 1
