"""Reports that people send become a table; files that are none, or contradict themselves, are named, whatever is in them."""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shell import Shell
from started_python import StartedPython

from sdflow.errors import UsageError
from sdflow.selftest.collect import COLUMNS, collect, markdown, row
from sdflow.selftest.result import Report, document, to_json
from sdflow.targets import TARGETS
from tests.selftest.test_selftest import WHOLE, drawn, image, judged, ran

ROOT = Path(__file__).parents[2]
DEVICE = {"processor": "A CPU", "cores": 8, "system": "Linux x86_64", "accelerator": None}
GOOD = replace(WHOLE, device=DEVICE, steps=20, image_ms=1234.4)


def put(folder: Path, name: str, report: Report | dict[str, Any] | bytes) -> None:
    content = report if isinstance(report, bytes) else b""
    if isinstance(report, Report):
        content = document(report)
    elif isinstance(report, dict):
        content = json.dumps({"kind": "selftest", "format_version": 1, **report}).encode()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def test_reports_become_rows_by_target_and_hardware(tmp_path: Path) -> None:
    gpu = replace(
        judged(replace(WHOLE, target="cuda", provider="CUDAExecutionProvider", submodels={"unet": ran("float16")}),
               [drawn(image(200))], [drawn(image(198))]),
        device={**DEVICE, "accelerator": "NVIDIA H200"}, steps=20, image_ms=71.0,
    )  # fmt: skip
    put(tmp_path, "z.json", GOOD)
    put(tmp_path, "sent/a.json", gpu)
    put(tmp_path, "notes.txt", b"no report")
    found = collect(tmp_path)
    assert [name for name, _ in found.reports] == ["z.json", "sent/a.json"]
    assert found.left_out == ()
    first, second = (dict(zip(COLUMNS, row(report), strict=True)) for _, report in found.reports)
    assert (first["hardware"], first["image"], first["result"]) == ("A CPU, 8 cores", "1234 ms, 20 steps", "passed")
    assert first["nearest and farthest image"] == "equal and equal"
    assert (second["hardware"], second["provider"], second["versions"]) == ("NVIDIA H200", "CUDA", "onnxruntime 1.31.1")


def png(width: int, height: int, rows: bytes = b"") -> str:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def changed(**fields: Any) -> dict[str, Any]:
    return {**to_json(GOOD), **fields}


def with_image(**fields: Any) -> dict[str, Any]:
    content = to_json(GOOD)
    return {**content, "images": [{**content["images"][0], **fields}]}


STRANGE: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "empty": (b"", "not JSON"),
    "cut off": (document(GOOD)[:-40], "not JSON"),
    "of another kind": (b'{"kind": "bench"}', "is not a self-test report"),
    "a list": (b"[" * 90 + b"]" * 90, "is not a self-test report"),
    "nested": (b"[" * 100_000, "not JSON"),
    "no text": (b"\xff\xfe\x00", "not JSON"),
    "of a later format": (document(GOOD).replace(b'"format_version": 1', b'"format_version": 9'), "the format 9"),
    "of no target": (changed(target="abacus"), "no target is named 'abacus'"),
    "of another provider": (changed(provider="CUDAExecutionProvider"), "which is not a provider of cpu"),
    "of none": (changed(provider=None), "which is not a provider of cpu"),
    "that did not run": (changed(verdict="unavailable", reason="no GPU"), "nothing ran: unavailable"),
    "without images": (changed(images=[]), "without an image"),
    "that claims too much": (with_image(png=drawn(image(20))["png"]), "it claims passed, but by its images"),
    "that claims too little": (changed(verdict="failed"), "it claims failed, but by its images"),
    "with other figures": (with_image(decibels=80.0), "it claims 80.0 dB for an image that is 200.0 dB"),
    "whose nodes are elsewhere": (
        changed(submodels={"unet": {**to_json(GOOD)["submodels"]["unet"], "fallen": [["n", "Conv", "CPU"]]}}),
        "by its images and nodes it is failed",
    ),
    "of a time in no steps": (changed(steps=None), "but not the number of steps"),
    "a bomb": (with_image(png=png(60_000, 60_000)), "an image has 60000x60000 pixels"),
    "a cut image": (with_image(png=png(16, 16, b"")), "an image"),
    "no image": (with_image(png=base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()), "an image is damaged"),
    "of another size": (with_image(png=png(8, 8, bytes(8 * 25))), "an image"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_file_that_is_no_report_or_contradicts_itself_is_named(what: str, tmp_path: Path) -> None:
    content, why = STRANGE[what]
    put(tmp_path, "good.json", GOOD)
    put(tmp_path, f"{what}.json", content)
    found = collect(tmp_path)
    assert [name for name, _ in found.reports] == ["good.json"]
    (left,) = found.left_out
    assert left.file == f"{what}.json"
    assert why in left.why


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(to_json(GOOD))), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4)
)
def test_any_value_anywhere_is_a_row_or_a_reason(tmp_path: Path, key: str, value: Any) -> None:
    put(tmp_path, "good.json", replace(GOOD, notes=("the other",)))
    put(tmp_path, "strange.json", changed(**{key: value}))
    found = collect(tmp_path)
    assert len(found.reports) + len(found.left_out) == 2
    assert markdown(found).count("\n") == 2 + len(found.reports)


def test_what_is_no_file_is_named_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    put(folder, "good.json", GOOD)
    os.mkfifo(folder / "pipe.json")
    (folder / "gone.json").symlink_to(tmp_path / "nothing")
    (folder / "again.json").write_bytes((folder / "good.json").read_bytes())
    put(tmp_path / "elsewhere", "other.json", replace(GOOD, notes=("elsewhere",)))
    (folder / "file.json").symlink_to(tmp_path / "elsewhere" / "other.json")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    found = collect(folder)
    assert [name for name, _ in found.reports] == ["again.json"]
    assert {each.file: each.why.split(" ")[0] for each in found.left_out}.keys() == {
        "file.json",
        "gone.json",
        "good.json",
        "pipe.json",
    }
    assert "is the same as again.json" in {each.why for each in found.left_out}


def test_a_report_is_text_in_the_table(tmp_path: Path) -> None:
    hostile = "x | y\n| <img src=x onerror=alert(1)> [a](javascript:b) `c` \x1b[2J" + "z" * 500
    put(
        tmp_path,
        "good.json",
        replace(GOOD, device={**DEVICE, "accelerator": hostile}, versions={"onnxruntime": hostile}),
    )
    put(tmp_path, "linking.json", replace(GOOD, device={**DEVICE, "accelerator": "https://evil.x www.evil a@evil.x"}))
    table = markdown(collect(tmp_path))
    assert table.count("evil") == 3 and not any(each in table for each in ("https:", "www.", "@"))
    assert table.count("\n") == 4
    (line,) = (each for each in table.splitlines() if "alert" in each)
    cells = line.split("|")
    assert len(cells) == len(COLUMNS) + 2
    assert not set("<>`[]\x1b") & set(table)
    assert max(map(len, cells)) < 900


def test_a_folder_without_reports_is_told_and_names_the_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder"):
        collect(tmp_path / "nothing")
    with pytest.raises(UsageError, match="it contains no usable report"):
        collect(tmp_path)
    put(tmp_path, "broken.json", b"{")
    with pytest.raises(UsageError, match=r"broken\.json: is damaged"):
        collect(tmp_path)


def test_the_command_prints_the_table_and_names_what_it_left_out(
    started_python: StartedPython | None, tmp_path: Path
) -> None:
    shell = Shell(tmp_path, started_python)
    put(tmp_path / "reports", "good.json", GOOD)
    put(tmp_path / "reports", "bad\n.json", b"{")
    done = shell.run("selftest", "--collect", "reports")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| hardware | system | target |")
    assert done.stderr.startswith("skipped: bad\\n.json: is damaged")
    told = json.loads(shell.run("selftest", "--collect", "reports", "--json").stdout)
    assert [each["file"] for each in told["reports"]] == ["good.json"]
    refused = shell.run("selftest", "--collect", "reports", "--engine-cache", "engines")
    assert refused.returncode == 2 and "only reads reports" in refused.stderr
    assert told["reports"][0]["hardware"] == "A CPU, 8 cores"
    assert [each["file"] for each in told["left_out"]] == ["bad\\n.json"]


def test_the_manuals_table_is_made_of_the_reports_that_are_kept() -> None:
    page, kept = (
        (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8"),
        ROOT / "benchmarks" / "hardware",
    )
    if not list(kept.glob("*.json")):
        assert "No report has been kept yet" in page
        return
    found = collect(kept)
    assert found.left_out == ()
    assert markdown(found) in page


def test_the_form_for_reports_offers_every_target() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "hardware.yml").read_text(encoding="utf-8"))
    (targets,) = (each["attributes"]["options"] for each in form["body"] if each.get("id") == "target")
    assert targets == list(TARGETS)
