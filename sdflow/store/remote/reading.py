"""Reads files of a remote as streams with a size limit, whatever the server sends.

A server may send endless data, drip, send compression bombs, or redirect. Reads therefore stop at the caller's limit,
nothing is decompressed, redirects stay on their host, and each request has one overall deadline.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sdflow.disk.input_file import open_input
from sdflow.store.records import BadRecord
from sdflow.store.remote.spec import without_secrets

MOST_OF_AN_ANSWER = 16 << 20  # bytes of a listing's page (1,000 names in S3) or of an error
MOST_LISTED = 1_000_000  # files
REDIRECTS = 5
LOCAL, HTTP, S3 = ("file", "local"), ("http", "https"), ("s3", "s3a")  # fsspec's protocols with readers of their own
_CHUNK = 64 << 10


class TooLong(BadRecord):
    """A file of the remote exceeds the limit of its kind."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it is longer than its maximum of {limit:,} bytes")


class Misled(Exception):
    """The server answers in a way that was not requested, such as compressed or with a redirect to another host."""


def read(files: Any, protocol: str, path: str, limit: int, seconds: float) -> bytes:
    """Read a file of an fsspec store. Raises FileNotFoundError, TooLong, Misled, and errors of the store's library."""
    if protocol in HTTP or protocol in S3:
        from fsspec.asyn import sync

        read_there = _read_http if protocol in HTTP else _read_s3
        return bytes(sync(files.loop, read_there, files, path, limit, timeout=seconds))
    if protocol in LOCAL:
        with open_input(Path(path)) as stream:
            data = stream.read(limit + 1)
    else:
        info = files.info(path)
        encoding = info.get("contentEncoding") or getattr(info.get("content_settings"), "content_encoding", None)
        if encoding not in (None, "", "identity"):
            raise Misled(f"it returned a file compressed that was pushed uncompressed ({encoding:.40})")
        if int(info.get("size") or 0) > limit:
            raise TooLong(limit)
        data = bytes(files.cat_file(path, start=0, end=limit + 1))
    if len(data) > limit:
        raise TooLong(limit)
    return data


async def _read_http(files: Any, url: str, limit: int) -> bytes:
    session, here = await files.set_session(), files.encode_url(url)
    headers = {"Accept-Encoding": "identity", "Range": f"bytes=0-{limit}"}
    for _ in range(REDIRECTS + 1):
        async with session.get(here, headers=headers, allow_redirects=False) as answer:
            if answer.status in (301, 302, 303, 307, 308):
                here = _redirected(here, answer.headers.get("Location", ""))
                continue
            if answer.status == 404:
                raise FileNotFoundError(url)
            if answer.status == 416:  # range not satisfiable: the file is empty
                return b""
            answer.raise_for_status()
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.strip().lower() not in ("", "identity"):
                raise Misled(
                    f"it compresses a response that was requested uncompressed (Content-Encoding: {encoding:.40})"
                )
            return await _read_stream(answer.content, limit)
    raise Misled(f"it redirects more than {REDIRECTS} times")


def _redirected(here: Any, location: str) -> Any:
    """Return a redirect's URL: same host, same scheme and port or https at 443. Raises Misled otherwise."""
    from yarl import URL

    try:
        there = here.join(URL(location))
        same = there.host == here.host and (there.scheme, there.port) in ((here.scheme, here.port), ("https", 443))
    except ValueError as error:
        raise Misled("it redirects to an invalid URL") from error
    if not location or not same:
        raise Misled(f"it redirects to another server ({without_secrets(str(there))[:100]})")
    return there


async def _read_s3(files: Any, path: str, limit: int) -> bytes:
    bucket, key, _ = files.split_path(path)
    answer = await files._call_s3("get_object", Bucket=bucket, Key=key)
    try:
        return await _read_stream(answer["Body"], limit)
    finally:
        answer["Body"].close()


async def _read_stream(stream: Any, limit: int) -> bytes:
    data = bytearray()
    while chunk := await stream.read(min(_CHUNK, limit + 1 - len(data))):
        data += chunk
        if len(data) > limit:
            raise TooLong(limit)
    return bytes(data)


def open_archive(path: Path) -> Any:
    """Open a zip file as a file system. Raises OSError, BadZipFile, and Misled if it cannot be unpacked in chunks."""
    from zipfile import ZIP_DEFLATED, ZIP_STORED

    from fsspec.implementations.zip import ZipFileSystem

    files = ZipFileSystem(open_input(path))
    members = files.zip.infolist()
    _at_most((each.filename, {}) for each in members)
    if any(each.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or each.flag_bits & 1 for each in members):
        raise Misled("it contains a file that is encrypted, or compressed with something other than deflate")
    return files


def listing(files: Any, protocol: str, root: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Return path -> store's info of every file under a folder. Raises Misled, and whatever the store raises."""
    if protocol in LOCAL:
        return _at_most(_walk(files._strip_protocol(root)))
    if protocol in S3:
        from fsspec.asyn import sync

        return dict(sync(files.loop, _list_s3, files, root, timeout=seconds))
    return _at_most(files.find(root, detail=True).items())


def _walk(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk a folder without following links, which may form a loop."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                yield Path(entry.path).as_posix(), {"size": found.st_size, "mtime": found.st_mtime}


async def _list_s3(files: Any, root: str) -> dict[str, dict[str, Any]]:
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    bucket, prefix, _ = files.split_path(root)
    found: dict[str, dict[str, Any]] = {}
    try:
        async for info in files._iterdir(bucket, prefix=f"{prefix.rstrip('/')}/", delimiter=""):
            found |= _at_most([(info["name"], info)], len(found))
    except ClientError as error:
        raise translate_boto_error(error) from error
    return found


def _at_most(pairs: Iterable[tuple[str, dict[str, Any]]], before: int = 0) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path, info in pairs:
        found[path] = info
        if before + len(found) > MOST_LISTED:
            raise Misled(f"it lists more than {MOST_LISTED:,} files")
    return found


def open_limits(scheme: str, seconds: float) -> dict[str, Any]:
    """Return fsspec options: limits, and no listing cache, as others write there too. Raises ImportError."""
    anew = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in S3:
        times = {"connect_timeout": seconds, "read_timeout": seconds}
        retries = {"max_attempts": 2, "mode": "standard"}
        return {**anew, "config_kwargs": {**times, "retries": retries, "http_session_cls": _s3_session()}}
    if scheme in HTTP:
        from aiohttp import ClientTimeout

        limit = ClientTimeout(total=seconds, sock_connect=seconds, sock_read=seconds)
        return {**anew, "allow_redirects": False, "client_kwargs": {"timeout": limit, "auto_decompress": False}}
    return {}


def _s3_session() -> type:
    """Return an aiobotocore session class that limits listings and errors, which s3fs and botocore read whole."""
    from aiobotocore.httpsession import AIOHTTPSession

    class Bounded(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(_ask_s3, session.request))

    return Bounded


async def _ask_s3(request: Any, *arguments: Any, **options: Any) -> Any:
    """Request without following redirects: botocore follows them itself, to hosts it knows."""
    answer = await request(*arguments, **options, allow_redirects=False)
    answer.read = partial(_read_stream, answer.content, MOST_OF_AN_ANSWER)
    return answer
