"""A self-test says what is so, holds nothing personal, and a report that is none is told as that."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from shell import Shell

from sdflow.errors import UsageError
from sdflow.selftest import judged, png_of
from sdflow.selftest.page import page, report_files, write_report
from sdflow.selftest.private import Private
from sdflow.selftest.result import Ran, Report, document, from_json, read_report, to_json


def image(value: int, spot: int = 0) -> Image.Image:
    pixels = np.full((16, 16, 3), value, np.uint8)
    pixels[:spot, :spot] = 255 - value
    return Image.fromarray(pixels)


def drawn(image: Image.Image, shows: bool = True) -> dict[str, Any]:
    return {"prompt": "a large red circle", "seed": 7, "png": png_of(image), "shows": shows}


def ran(element: str = "float32", fallen: tuple[tuple[str, str, str], ...] = ()) -> Ran:
    return Ran({"CPUExecutionProvider": 3}, 1, fallen, {"sample": f"2x4x16x16 {element}"}, 0.5, 12.5)


WHOLE = judged(
    Report("cpu", provider="CPUExecutionProvider", submodels={"unet": ran()}, versions={"onnxruntime": "1.31.1"}),
    [drawn(image(200))],
    [drawn(image(200))],
)


def test_equal_images_with_every_node_in_its_place_pass() -> None:
    assert (WHOLE.verdict, WHOLE.reason) == ("passed", None)
    assert (WHOLE.images[0].decibels, WHOLE.images[0].largest) == (200.0, 0.0)


def test_an_image_that_is_another_fails_and_says_by_how_much() -> None:
    found = judged(WHOLE, [drawn(image(200))], [drawn(image(200, spot=8))])
    assert found.verdict == "failed"
    assert found.reason is not None
    assert "'a large red circle' is" in found.reason
    assert "60 are required" in found.reason


def test_in_float16_an_image_of_the_same_shape_may_be_elsewhere_and_another_shape_may_not() -> None:
    half = replace(WHOLE, submodels={"unet": ran("float16")})
    apart = [drawn(image(200))], [drawn(image(200, spot=4))]
    assert judged(half, *apart).verdict == "passed"
    assert judged(half, apart[0], [drawn(image(200, spot=4), shows=False)]).verdict == "failed"


def test_a_node_on_another_provider_fails_whatever_is_drawn() -> None:
    fell = replace(WHOLE, submodels={"unet": ran(fallen=(("/Resize", "Resize", "CPUExecutionProvider"),))})
    found = judged(fell, [drawn(image(200))], [drawn(image(200))])
    assert (found.verdict, found.reason) == ("failed", "unet: 1 nodes do not run on CPUExecutionProvider")


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = report_files(tmp_path / "deep" / "report.json")
    write_report(WHOLE, files)
    assert read_report(files[0]) == WHOLE
    assert [path.name for path in files] == ["report.json", "report.html"]
    assert f"data:image/png;base64,{WHOLE.images[0].png}" in files[1].read_text()


def test_an_image_of_a_report_is_pixels_alone() -> None:
    from PIL.PngImagePlugin import PngInfo

    text, stream = PngInfo(), io.BytesIO()
    text.add_text("sdflow", "/home/somebody")
    image(9).save(stream, "PNG", pnginfo=text)
    with Image.open(stream) as opened:
        assert b"somebody" not in base64.b64decode(png_of(opened))


# Nothing personal

LETTERS = st.sampled_from("bcdfghjkqvwxz")
NAME = st.text(LETTERS, min_size=2, max_size=9).map(lambda text: f"zq{text}")
SAID = st.sampled_from(
    [
        "cannot open {home}/.cache/sdflow/x.onnx",
        "{windows}\\AppData\\Local\\Temp\\model.onnx is damaged",
        "no module at '{home}'; user {user}@{host}",
        "C:\\Users\\{user}\\sdflow: access denied",
        "\\\\{host}\\share\\models",
        "/mnt/{user}/data:/opt/{host}/x, file:///home/{user}/y",
        "{upper} on {host}.example.org: {user}'s device was lost",
        "work/{user}/pipelines/shapes",
        "/scratch/{user}",
        "~/{user}/x",
    ]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(user=NAME, host=NAME, said=st.lists(SAID, min_size=1, max_size=4), where=st.integers(0, 6))
def test_neither_user_nor_machine_nor_path_is_in_a_report(
    monkeypatch: pytest.MonkeyPatch, user: str, host: str, said: list[str], where: int
) -> None:
    """Planted in the environment and in every text that somebody else may write; looked for in both files."""
    home = f"/home/{user}"
    with monkeypatch.context() as patched:
        for key, value in (("HOME", home), ("USER", user), ("LOGNAME", user), ("TMPDIR", f"/scratch/{user}")):
            patched.setenv(key, value)
        patched.setattr("socket.gethostname", lambda: f"{host}.example.org")
        private = Private.here()
    words = {"home": home, "windows": f"D:\\Home Folders\\{user}", "user": user, "host": host, "upper": user.upper()}
    texts = [each.format(**words) for each in said]
    everywhere = " | ".join(texts)
    report = replace(
        WHOLE,
        verdict="broken",
        reason=everywhere,
        notes=tuple(texts),
        provider=everywhere if where == 0 else WHOLE.provider,
        device={
            "processor": f"CPU of {user}" if where == 1 else "CPU",
            "system": f"Linux {host}" if where == 2 else "",
        },
        versions={"onnxruntime": f"1.31.1+{user}" if where == 3 else "1.31.1"},
        submodels={
            "unet": replace(
                ran(fallen=((f"/{user}/Conv", host, user),) if where == 4 else ()),
                nodes={host if where == 5 else "CPUExecutionProvider": 3},
                inputs={user if where == 6 else "sample": "1"},
            )
        },
    )
    cleared = private.cleared(report)
    without_pixels = replace(cleared, images=())
    for text in (document(without_pixels).decode(), page(without_pixels)):
        for secret in (user, host, home, "Home Folders\\" + user):
            assert secret.casefold() not in text.casefold()
        assert "/scratch/" not in text
    assert cleared.images == report.images
    assert cleared.verdict == "broken"


def test_what_is_no_path_stays() -> None:
    private = Private.of(["/home/zqx"], ["zqx"])
    kept = "unet: 3 of 12 nodes do not run on CUDAExecutionProvider: Conv (com.microsoft.NhwcConv), 1/2 of 4x4"
    assert private.text(kept) == kept


def test_a_user_of_one_of_our_words_does_not_make_a_report_unreadable() -> None:
    for name in ("passed", "cpu", "unet", "png", "verdict", "nodes", "float32"):
        cleared = Private.of([], [name]).cleared(WHOLE)
        assert from_json(to_json(cleared)) == cleared
        assert (cleared.verdict, cleared.target) == ("passed", "cpu")


# Reports of others


def altered(**changes: Any) -> bytes:
    return json.dumps({**json.loads(document(WHOLE)), **changes}).encode()


FOREIGN = {
    "no JSON": (b"\x89PNG\r\n", "not JSON"),
    "half of one": (document(WHOLE)[:400], "not JSON"),
    "empty": (b"", "not JSON"),
    "a list": (b"[1]", "is not a self-test report"),
    "another document": (b'{"kind": "bench", "format_version": 1}', "is not a self-test report"),
    "a later format": (altered(format_version=2), "has the format 2"),
    "a field of the wrong type": (altered(submodels=[]), "submodels: Input should be"),
    "a field too many": (altered(home="/home/x"), "home: Unexpected"),
    "a verdict of its own": (altered(verdict="splendid"), "verdict: Input should be"),
    "an image that is none": (altered(images=[{**asdict(WHOLE.images[0]), "png": "aGk="}]), "is not a PNG"),
    "an image that is no base64": (altered(images=[{**asdict(WHOLE.images[0]), "png": "<script>"}]), "is damaged"),
    "a text in place of a number": (altered(image_ms="fast"), "image_ms: Input should be a valid number"),
    "a table in the versions": (altered(versions={"a": {"b": 1}}), "versions.a: Input should be"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_that_is_no_report_is_told_as_that(case: str, tmp_path: Path) -> None:
    content, said = FOREIGN[case]
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_report(path)
    assert said in raised.value.what
    assert raised.value.where == str(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from(sorted(to_json(WHOLE))))
def test_any_value_in_any_field_is_read_or_told(value: Any, key: str) -> None:
    try:
        from_json({**to_json(WHOLE), key: value})
    except ValueError as error:
        assert str(error)


def test_a_report_of_somebody_else_is_shown_and_moves_no_cursor(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "r.json").write_bytes(document(replace(WHOLE, reason="\x1b[2Jgone <script>alert(1)</script>")))
    shown = shell.run("selftest", "--show", "r.json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "cpu: passed" in shown.stdout
    assert "3 on CPUExecutionProvider" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "<script>" not in page(read_report(tmp_path / "r.json"))
    refused = shell.run("selftest", "--show", "r.json", "--target", "cpu")
    assert refused.returncode == 2


@pytest.mark.slow
def test_the_sample_passes_on_the_cpu_and_a_target_that_is_missing_is_a_report_too(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    done = shell.run("selftest", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    found = read_report(tmp_path / "r.json")
    assert (found.verdict, found.provider) == ("passed", "CPUExecutionProvider")
    assert all(pair.decibels >= 60 for pair in found.images)
    assert any(pair.shows for pair in found.images)
    assert found.image_ms
    assert found.image_ms > 0
    assert str(tmp_path) not in (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text()

    missing = shell.run("selftest", "--target", "directml", "--report", "missing.json")
    assert missing.returncode == 5, missing.stderr
    assert read_report(tmp_path / "missing.json").verdict == "unavailable"
