"""User-defined passes: `pass: user_scripts/prune.py:ClassName`; the class is optional if the file has only one.

The file is plain Python with a subclass of `sdflow.passes.base.Pass`. The step's key covers its content and the modules
that it imports from its own folder.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn, get_args

from sdflow.disk.input_file import is_regular, read_input
from sdflow.errors import PassError
from sdflow.passes.base import InputKind, Pass, PassConfig
from sdflow.stop import Stopped

MOST_LINES = 20
"""Maximum number of traceback lines shown for a script."""

AnyPass = type[Pass[PassConfig]]


def is_user_pass(name: str) -> bool:
    """Whether `name` is a path to a script rather than the name of a pass."""
    return name.split(":")[0].endswith(".py") or "/" in name


def user_script_files(name: str, folder: Path) -> tuple[Path, ...]:
    """Return the script of `name` and the files that it imports from its folder, sorted. Raises PassError if
    missing."""
    script = _script(name, folder)
    found = [script]
    for path in found:  # grows while it is walked
        found.extend(other for other in _imports_from_folder(path) if other not in found)
    return tuple(sorted(found))


def load_user_pass(name: str, folder: Path) -> AnyPass:
    """Return the pass class of a script. folder: base of relative paths.

    Raises PassError with the script's line if it cannot be loaded or does not contain the requested pass.
    """
    script = _script(name, folder)
    _, _, wanted = name.partition(":")
    module = _load(script)
    passes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Pass) and value.__module__ == module.__name__
    }
    if wanted and wanted not in passes:
        raise PassError(
            f"no pass {wanted!r} in this file", where=str(script), remedy=f"It has {', '.join(passes) or 'none'}."
        )
    if not wanted and len(passes) != 1:
        raise PassError(
            f"{len(passes)} passes in this file: {', '.join(passes) or 'none derives from sdflow.passes.base.Pass'}",
            where=str(script),
            remedy=f"Name one: {script.name}:ClassName.",
        )
    found = passes[wanted or next(iter(passes))]
    try:
        _check(found, script)
    except PassError:
        raise
    except Exception as cause:  # attribute access on user classes may run any code
        raise _failure(cause, script, f"when {found.__name__} is inspected") from cause
    return found


def _script(name: str, folder: Path) -> Path:
    written = name.partition(":")[0]
    for above in (folder, *folder.absolute().parents):
        if is_regular(above / written):
            return (above / written).resolve()
    raise PassError(
        "there is no such script",
        where=str(folder / written)[:500],
        remedy="Paths are relative to the workflow's folder or one of its parents.",
    )


def _load(script: Path) -> ModuleType:
    # The name contains the content hash: a changed script is a new module, and scripts with equal names do not collide.
    content = read_input(script)
    name = f"sdflow_user_{script.stem}_{hashlib.sha256(content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None:
        raise PassError("cannot be loaded as Python", where=str(script))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(script.parent)
    sys.path.insert(0, folder)
    try:
        with _compiled_anew(script.parent), redirect_stdout(sys.stderr):  # standard output is for results
            exec(compile(content, script, "exec", dont_inherit=True), vars(module))
    except (Stopped, KeyboardInterrupt):
        del sys.modules[name]
        raise
    except BaseException as cause:  # user code may raise anything, including SystemExit
        del sys.modules[name]
        raise _failure(cause, script, "when it is imported") from cause
    finally:
        sys.path.remove(folder)
    return module


class _FromSource(SourceFileLoader):
    """Loader that always compiles from source. Cached bytecode counts as current if size and mtime (in seconds) match,
    which an edit may preserve."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError(path)  # makes the import system skip reading and writing bytecode


@contextmanager
def _compiled_anew(folder: Path) -> Iterator[None]:
    """While active, imports from this folder are compiled from source, except those in site-packages."""

    def finder(path: str) -> FileFinder:
        place = Path(path)
        if not place.is_relative_to(folder) or "site-packages" in place.parts:
            raise ImportError(path)
        return FileFinder(path, (_FromSource, SOURCE_SUFFIXES))

    def forget() -> None:
        for path in [path for path in sys.path_importer_cache if Path(path).is_relative_to(folder)]:
            del sys.path_importer_cache[path]

    forget()
    sys.path_hooks.insert(0, finder)
    try:
        yield
    finally:
        sys.path_hooks.remove(finder)
        forget()
        for name, module in list(sys.modules.items()):  # another script may have a different module of this name
            if isinstance(getattr(module, "__loader__", None), _FromSource):
                del sys.modules[name]


def _failure(cause: BaseException, script: Path, when: str) -> PassError:
    try:
        said = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    except Exception:  # noqa: BLE001  its __str__ may fail
        said = type(cause).__name__
    own = "".join(f"\n  {line}" for line in _own_lines(cause, script))
    return PassError(f"{said} {when}", where=f"{script}:{_line(cause, script)}", remedy=f"Correct the script.{own}")


def failed_run(cause: BaseException, name: str, folder: Path) -> PassError:
    """Wrap an exception of a running user pass, with the script's own traceback lines."""
    return _failure(cause, _script(name, folder), "while it ran")


def _own_lines(cause: BaseException, script: Path) -> Iterator[str]:
    """Yield the traceback lines from the script on, excluding sdflow's own."""
    own = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(cause.__traceback__)
    begin = next((index for index, frame in enumerate(frames) if Path(frame.filename) == script), len(frames))
    for frame in frames[begin:][-MOST_LINES:]:
        if not frame.filename.startswith((own, "<frozen")):
            yield f"| {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _line(cause: BaseException, script: Path) -> int:
    """Return the last line of the script in the traceback."""
    if isinstance(cause, SyntaxError) and cause.lineno:
        return cause.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if Path(frame.filename) == script]
    return (lines[-1] if lines else None) or 1


_KINDS = {
    "name": (str, "text"),
    "version": (int, "a whole number"),
    "uses": (tuple, "a tuple of distributions"),
    "takes_loras": (bool, "True or False"),
    "moves_weights": (bool, "True or False"),
    "weights_read_by": (Mapping, "a map of options"),
}


def _check(found: AnyPass, script: Path) -> None:
    try:
        where = f"{script}:{inspect.getsourcelines(found)[1]}"
    except OSError:  # created by a call, not a class statement
        where = str(script)
    lacking = [field for field in ("name", "version", "Config") if not hasattr(found, field)]
    if lacking or inspect.isabstract(found):
        raise PassError(
            f"{found.__name__} lacks {', '.join(lacking or ['run'])}",
            where=where,
            remedy="See sdflow.passes.base.Pass for the required attributes.",
        )
    for field, (kind, words) in _KINDS.items():
        if not isinstance(value := getattr(found, field), kind):
            raise PassError(f"{found.__name__}.{field} is {value!r:.40}, not {words}", where=where)
    if found.accepts not in get_args(InputKind):
        raise PassError(
            f"{found.__name__}.accepts is {found.accepts!r:.40}, not {' or '.join(get_args(InputKind))}", where=where
        )
    if not (inspect.isclass(found.Config) and issubclass(found.Config, PassConfig)):
        raise PassError(f"{found.__name__}.Config does not derive from sdflow.passes.base.PassConfig", where=where)


def _imports_from_folder(script: Path) -> Iterator[Path]:
    """Yield the files in the script's folder that it imports by name."""
    try:
        tree = ast.parse(read_input(script))
    except SyntaxError as cause:
        raise PassError(f"SyntaxError: {cause.msg}", where=f"{script}:{cause.lineno}") from cause
    except (OSError, ValueError) as cause:  # ValueError: it contains NUL
        raise PassError(f"cannot be read as Python: {cause}", where=str(script)) from cause
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            first = script.parent / name.split(".")[0]
            if first.with_suffix(".py").is_file():
                yield first.with_suffix(".py")
            elif first.is_dir():
                yield from sorted(first.rglob("*.py"))
