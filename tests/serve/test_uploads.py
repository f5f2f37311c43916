"""Images that requests bring along: looked at before they are unpacked, and few formats alone."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.PngImagePlugin
import pytest

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.uploads import as_mask, read_base64, read_upload
from sdflow.serve.limits import Limits

LIMITS = Limits(pixels=64 * 64)


def file(image: PIL.Image.Image, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG that says it is of this size, and has not the pixels for it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (claiming(60000, 60000), "more than 4096 pixels|exceeds limit"),
        (claiming(2**31 - 1, 2**31 - 1), "more than 4096 pixels|exceeds limit"),
        (claiming(8000, 8000), "8000x8000, more than 4096 pixels"),
        (file(PIL.Image.new("L", (3000, 3000)), "PNG"), "3000x3000, more"),
        (file(PIL.Image.new("RGB", (65, 64)), "JPEG"), "65x64, more"),
        (file(PIL.Image.new("RGB", (64, 65)), "WEBP"), "64x65, more"),
    ],
)
def test_a_bomb_is_refused_before_a_pixel_is_unpacked(
    content: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(content) < 100_000

    def unpacked(*arguments: object) -> None:
        raise AssertionError("its pixels were unpacked")

    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", unpacked)
    with pytest.raises(ApiError, match=says) as error:
        read_upload(content, "image", LIMITS)
    assert (error.value.status, error.value.param) == (400, "image")


def test_a_bomb_in_the_words_of_an_image_is_refused() -> None:
    words = PIL.PngImagePlugin.PngInfo()
    words.add_text("Comment", "a" * (64 << 20), zip=True)
    content = file(PIL.Image.new("RGB", (8, 8)), "PNG", pnginfo=words)
    assert len(content) < 100_000
    with pytest.raises(ApiError, match="not a readable image"):
        read_upload(content, "image", LIMITS)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "PPM", "ICO", "PDF", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(ApiError, match=r"not a readable image \(PNG, JPEG, WEBP\)$"):
        read_upload(file(PIL.Image.new("RGB", (32, 32)), kind), "image", LIMITS)


def test_what_is_damaged_behind_its_beginning_is_refused() -> None:
    random = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    for kind in ("PNG", "JPEG", "WEBP"):
        with pytest.raises(ApiError, match="not a readable image"):
            read_upload(file(PIL.Image.fromarray(random), kind)[:600], "image", LIMITS)


def test_what_is_no_base64_is_refused() -> None:
    content = b64encode(file(PIL.Image.new("RGB", (8, 8)), "PNG")).decode()
    assert read_base64(f"data:image/png;base64,{content}", "image", LIMITS).size == (8, 8)
    for text in ("/etc/passwd", "http://127.0.0.1/secret.png", "file:///etc/passwd", f"{content}!", "é"):
        with pytest.raises(ApiError, match=r"not valid base64|not a readable image"):
            read_base64(text, "image", LIMITS)


def test_an_image_lies_as_its_camera_was_held() -> None:
    image, turned = PIL.Image.new("RGB", (32, 16)), PIL.Image.Exif()
    turned[0x0112] = 6
    assert read_upload(file(image, "JPEG", exif=turned), "image", LIMITS).size == (16, 32)


def test_only_what_is_transparent_is_drawn_and_else_the_white() -> None:
    clear = PIL.Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    clear.putpixel((0, 0), (0, 0, 0, 0))
    white = PIL.Image.new("L", (2, 1))
    white.putpixel((1, 0), 255)
    assert as_mask(read_upload(file(clear, "PNG"), "mask", LIMITS)).pixels == b"\xff\x00"
    assert as_mask(read_upload(file(white, "PNG"), "mask", LIMITS)).pixels == b"\x00\xff"
