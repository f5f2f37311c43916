"""A server of a shared folder that lies, as a process: prints its port, and serves until it is ended.

    python liar.py SHARED ELSEWHERE

The URL says how: http://HOST:PORT/KIND/OF/… serves SHARED truthfully but for paths that begin with OF (actions, objects or
pieces), where it does KIND. Kinds are the functions below. ELSEWHERE: host and port that a redirect leads to.
"""

from __future__ import annotations

import gzip
import socket
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHARED, ELSEWHERE = (Path(sys.argv[1]), sys.argv[2]) if __name__ == "__main__" else (Path(), "")
BLOCK = bytes(1 << 20)
KINDS: dict[str, Callable[[Liar, bytes], None]] = {}


def kind(function: Callable[[Liar, bytes], None]) -> Callable[[Liar, bytes], None]:
    KINDS[function.__name__] = function
    return function


class Liar(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if "list-type" in self.path:  # a listing of S3: the bucket is named as the kind
            self.close_connection = True
            with suppress(OSError):
                KINDS[self.path.strip("/").partition("?")[0]](self, b"")
            return
        _, named, of, path = self.path.split("/", 3)
        file = SHARED / path
        data = file.read_bytes() if file.is_file() else b""
        self.close_connection = True
        with suppress(OSError):  # the reader had enough
            if f"/{of}/" in f"/{path}":
                KINDS[named](self, data)
            elif file.is_file():
                self.answer(data)
            else:
                self.send_error(404)

    do_HEAD = do_GET

    def begin(self, status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def answer(self, data: bytes, status: int = 200, **headers: object) -> None:
        self.begin(status, Content_Length=len(data), **headers)
        self.wfile.write(data)

    def raw(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def chunk(self, data: bytes) -> None:
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *args: object) -> None:
        pass


@kind
def endless(liar: Liar, data: bytes) -> None:
    liar.begin()
    while True:
        liar.raw(BLOCK)


@kind
def endless_chunks(liar: Liar, data: bytes) -> None:
    liar.begin(Transfer_Encoding="chunked")
    while True:
        liar.chunk(BLOCK)


@kind
def a_terabyte(liar: Liar, data: bytes) -> None:
    liar.begin(Content_Length=1 << 40)
    while True:
        liar.raw(BLOCK)


@kind
def endless_of_a_range(liar: Liar, data: bytes) -> None:
    liar.begin(206, Content_Range="bytes 0-1099511627775/1099511627776", Content_Length=1 << 40)
    while True:
        liar.raw(BLOCK)


@kind
def endless_after_the_truth(liar: Liar, data: bytes) -> None:
    liar.begin()
    liar.raw(data)
    while True:
        liar.raw(b" " * len(BLOCK))


@kind
def gzip_bomb(liar: Liar, data: bytes) -> None:
    liar.answer(bomb(), Content_Encoding="gzip")


@kind
def deflate_bomb(liar: Liar, data: bytes) -> None:
    packer = zlib.compressobj(9)
    liar.begin(Content_Encoding="deflate")
    for _ in range(2048):
        liar.raw(packer.compress(BLOCK))
    liar.raw(packer.flush())


@kind
def compressed_truth(liar: Liar, data: bytes) -> None:
    liar.answer(gzip.compress(data), Content_Encoding="gzip")


@kind
def transfer_compressed(liar: Liar, data: bytes) -> None:
    liar.begin(Transfer_Encoding="gzip, chunked")
    liar.chunk(bomb())
    liar.raw(b"0\r\n\r\n")


@kind
def drip(liar: Liar, data: bytes) -> None:
    liar.begin(Content_Length=1 << 20)
    while True:
        liar.raw(b" ")
        time.sleep(0.05)


@kind
def dripping_headers(liar: Liar, data: bytes) -> None:
    liar.raw(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        liar.raw(b"x")
        time.sleep(0.05)


@kind
def silence(liar: Liar, data: bytes) -> None:
    while liar.connection.recv(1):
        pass


@kind
def endless_headers(liar: Liar, data: bytes) -> None:
    liar.raw(b"HTTP/1.1 200 OK\r\n")
    number = 0
    while True:
        liar.raw(b"".join(b"X-%d: %s\r\n" % (number + each, b"x" * 1000) for each in range(100)))
        number += 100


@kind
def one_endless_header(liar: Liar, data: bytes) -> None:
    liar.raw(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        liar.raw(b"x" * len(BLOCK))


@kind
def endless_status(liar: Liar, data: bytes) -> None:
    liar.raw(b"HTTP/1.1 200 ")
    while True:
        liar.raw(b"x" * len(BLOCK))


@kind
def endless_hints(liar: Liar, data: bytes) -> None:
    while True:
        liar.raw(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100)


@kind
def endless_chunk_extension(liar: Liar, data: bytes) -> None:
    liar.begin(Transfer_Encoding="chunked")
    liar.raw(b"5;")
    while True:
        liar.raw(b"x" * len(BLOCK))


@kind
def endless_trailers(liar: Liar, data: bytes) -> None:
    liar.begin(Transfer_Encoding="chunked")
    liar.chunk(data or b" ")
    liar.raw(b"0\r\n")
    while True:
        liar.raw(b"X-Trailer: x\r\n" * 1000)


@kind
def longer(liar: Liar, data: bytes) -> None:
    liar.answer(data + b"x")


@kind
def shorter(liar: Liar, data: bytes) -> None:
    liar.answer(data[:-1])


@kind
def cut_off(liar: Liar, data: bytes) -> None:
    liar.begin(Content_Length=len(data) + 100)
    liar.raw(data)


@kind
def empty(liar: Liar, data: bytes) -> None:
    liar.answer(b"")


@kind
def flipped(liar: Liar, data: bytes) -> None:
    liar.answer(data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")


@kind
def another_range(liar: Liar, data: bytes) -> None:
    liar.answer(data[1:], 206, Content_Range=f"bytes 1-{len(data)}/{len(data)}")


@kind
def no_content(liar: Liar, data: bytes) -> None:
    liar.begin(204)


@kind
def nonsense(liar: Liar, data: bytes) -> None:
    liar.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100)


@kind
def negative_length(liar: Liar, data: bytes) -> None:
    liar.begin(Content_Length=-5)
    liar.raw(data)


@kind
def two_lengths(liar: Liar, data: bytes) -> None:
    liar.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: %d\r\n\r\n" % len(data) + data)


@kind
def login_page(liar: Liar, data: bytes) -> None:
    liar.answer(b"<!doctype html><title>Log in</title>", Content_Type="text/html")


@kind
def failing(liar: Liar, data: bytes) -> None:
    liar.answer(b"", 503)


@kind
def endless_error(liar: Liar, data: bytes) -> None:
    liar.begin(500)
    while True:
        liar.raw(BLOCK)


@kind
def redirected_elsewhere(liar: Liar, data: bytes) -> None:
    """To a server that must not be asked, at the place where the truth lies."""
    liar.answer(b"", 302, Location=f"http://{ELSEWHERE}{liar.path}")


@kind
def redirected_to_a_file(liar: Liar, data: bytes) -> None:
    liar.answer(b"", 302, Location="file:///etc/passwd")


@kind
def redirected_for_ever(liar: Liar, data: bytes) -> None:
    liar.answer(b"", 307, Location=liar.path)


@kind
def redirected_to_nothing(liar: Liar, data: bytes) -> None:
    liar.answer(b"", 308)


@kind
def redirected_here(liar: Liar, data: bytes) -> None:
    """The one that is followed."""
    liar.answer(b"", 301, Location=liar.path.replace("/redirected_here/", "/honest/"))


@kind
def honest(liar: Liar, data: bytes) -> None:
    liar.answer(data)


@kind
def replayed(liar: Liar, data: bytes) -> None:
    """What it has for something else, sound and signed."""
    folder = (SHARED / liar.path.split("/", 3)[3]).parents[1]
    others = sorted(path for path in folder.rglob("*") if path.is_file() and path.read_bytes() != data)
    liar.answer(others[0].read_bytes() if others else b"")


@kind
def nested(liar: Liar, data: bytes) -> None:
    liar.answer(b"[" * 200_000)


@kind
def wide(liar: Liar, data: bytes) -> None:
    """As much as a manifest may have, and of it as many objects as can be."""
    liar.answer(b'{"record": [' + b"[]," * 600_000 + b'[]], "sha256": ""}')


@kind
def huge_numbers(liar: Liar, data: bytes) -> None:
    liar.answer(b'{"record": {"format": ' + b"9" * 1_000_000 + b'}, "sha256": ""}')


@kind
def endless_pages(liar: Liar, data: bytes) -> None:
    """Of a listing, each sound: there is always one more."""
    begin = time.monotonic_ns()
    keys = (f"actions/sdflow-v1/actions/aa/{begin + number:064x}.json" for number in range(1000))
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>5</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    head = "<IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken><KeyCount>1000</KeyCount>"
    page = f"<ListBucketResult><Name>x</Name>{head}{contents}</ListBucketResult>"
    liar.answer(page.encode(), Content_Type="application/xml")


def bomb() -> bytes:
    """2 GB of zeros in 2 MB: members of 64 MB, one behind the other."""
    return gzip.compress(bytes(64 << 20), 9) * 32


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
