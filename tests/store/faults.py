"""Real faults in real processes: kills, full disks, read-only mounts."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import filelock  # noqa: F401  (children that gave up root cannot import any more)

NOBODY = 65534
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000

FILE_EVENTS = {
    *("open", "os.rename", "os.link", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.utime", "os.scandir"),
    *("os.listdir", "fcntl.flock", "shutil.rmtree", "sqlite3.connect"),
}


def start(body: Callable[[], object]) -> tuple[int, int]:
    """Fork a process that runs `body`; returns its id and a descriptor on which it says what went wrong."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    code = 1
    try:
        os.close(reader)
        body()
        code = 0
    except BaseException:  # noqa: BLE001  (the parent raises it)
        os.write(writer, traceback.format_exc().encode()[-60_000:])
    finally:
        os._exit(code)


def finish(child: tuple[int, int]) -> bool:
    """Wait for a started process: True if it ended well, False if it was killed; its failure is raised here."""
    process, reader = child
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"signal {os.WTERMSIG(status)}"
        return False
    assert status == 0, said
    return True


def in_process(body: Callable[[], object]) -> bool:
    return finish(start(body))


def killed_before_file_event(number: int, body: Callable[[], object]) -> bool:
    """Run `body` in a process that gets SIGKILL just before its `number`th file operation. True: it ended before."""

    def run() -> None:
        left = number

        def hook(event: str, arguments: object) -> None:
            nonlocal left
            if event in FILE_EVENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        body()

    return in_process(run)


def enter_mount_namespace() -> bool:
    """Give this process its own mounts; in a user namespace if it is an ordinary user. False where that is barred."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return _mount(b"none", Path("/"), None, MS_REC | MS_PRIVATE)


def _mount(source: bytes, place: Path, kind: bytes | None, flags: int, options: bytes | None = None) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.mount(source, os.fsencode(place), kind, ctypes.c_ulong(flags), options)


def small_disk(place: Path, size: int) -> str:
    """Give this process a file system of `size` bytes at `place`; where mounting is barred, files of at most that."""
    if enter_mount_namespace() and _mount(b"tmpfs", place, b"tmpfs", 0, b"size=%d" % size):
        return "tmpfs"
    small_files(size)
    return "limit"


def small_files(size: int) -> None:
    """No file of this process may grow beyond `size` bytes: writing fails with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def read_only(place: Path) -> None:
    """Make a folder read-only for this process: by a mount, or else by giving up root, or by the permissions."""
    if enter_mount_namespace() and _mount(os.fsencode(place), place, None, MS_BIND):
        assert _mount(b"none", place, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
        return
    if os.getuid() == 0:
        os.setuid(NOBODY)
        return
    for folder in (place, *place.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o555)


def ordinary_user() -> None:
    """Give up root, to which permissions do not apply."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
