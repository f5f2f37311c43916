"""When a process loads, creates, proves and first runs what an image needs."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FUNCTIONS = (
    ("sdflow.machine.providers", "onnxruntime_for"),
    ("sdflow.runtime.files.folder", "load_companion"),
    ("sdflow.runtime.files.trial", "try_companion"),
    ("sdflow.runtime.drawing.turns", "moving_weights"),
    ("sdflow.runtime.sessions.place", "_make_place"),
    ("sdflow.runtime.sessions.session", "create_session"),
    ("sdflow.runtime.sessions.session", "_load_cuda"),
    ("sdflow.runtime.sessions.specialize", "specialize"),
    ("sdflow.runtime.denoiser.split", "split"),
    ("sdflow.runtime.denoiser.schedule", "trace"),
    ("sdflow.runtime.kernels.library", "kernel_library"),
    ("sdflow.runtime.kernels.library", "_process_kernels"),
    ("sdflow.runtime.kernels.replace", "with_own_kernels"),
)
METHODS = (
    ("sdflow.runtime.drawing.loaded", "LoadedPipeline", "load"),
    ("sdflow.runtime.sessions.device_weights", "DeviceWeights", "_copied"),
    ("sdflow.runtime.kernels.library", "Kernels", "_give"),
    ("sdflow.runtime.kernels.library", "Kernels", "_prove"),
    ("sdflow.runtime.pipeline", "Pipeline", "drawing"),
    ("sdflow.runtime.drawing.parts", "PipelineParts", "condition"),
    ("sdflow.runtime.denoiser.denoisers", "Denoisers", "get"),
    ("sdflow.runtime.denoiser.denoiser", "PartedDenoiser", "_hold"),
    ("sdflow.runtime.drawing.drawing", "Drawing", "run"),
    ("sdflow.runtime.drawing.drawing", "Drawing", "finish"),
    ("onnxruntime", "InferenceSession", "__init__"),
)


class Spans:
    """begun: `time.time()` of the process's start, which all times count from."""

    def __init__(self, begun: float) -> None:
        self._begun, self._found = begun, list[dict[str, Any]]()
        self._threads: dict[int, int] = {}
        self._depth = threading.local()
        self._names: dict[int, str] = {}

    def told(self) -> list[dict[str, Any]]:
        """Spans in order of their starts: what, start and length in seconds, processor seconds of the thread, number of
        the thread, depth in it."""
        return sorted(self._found, key=lambda each: each["start"])

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        begun, processor = time.time(), time.thread_time()
        try:
            yield
        finally:
            self._depth.value = depth
            self._found.append(
                {
                    "what": what,
                    "start": round(begun - self._begun, 3),
                    "seconds": round(time.time() - begun, 3),
                    "processor": round(time.thread_time() - processor, 3),
                    "thread": thread,
                    "depth": depth,
                }
            )

    def watch(self) -> None:
        """Note the calls of FUNCTIONS and METHODS, and the first runs of each session, from now on."""
        for module, name in FUNCTIONS:
            original = getattr(importlib.import_module(module), name)
            noting = self._noting(original, name.strip("_"))
            for each in list(sys.modules.values()):
                if each.__name__.startswith("sdflow.") and vars(each).get(name) is original:
                    setattr(each, name, noting)
        for module, owner, name in METHODS:
            of = getattr(importlib.import_module(module), owner)
            original = vars(of)[name]
            if isinstance(original, classmethod):
                setattr(of, name, classmethod(self._noting(original.__func__, f"{owner}.{name}")))
            else:
                setattr(of, name, self._noting(original, f"{owner}.{name}"))
        self._watch_runs()

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*arguments: Any, **named: Any) -> Any:
            with self.span(f"{name} {_told(arguments, named)}".rstrip()):
                made = function(*arguments, **named)
            if name == "create_session":
                self._names[id(made)] = _told(arguments, named)
            return made

        return noting

    def _watch_runs(self) -> None:
        """The first runs of a session: the trial in which cuDNN compiles and chooses, and the one that is captured."""
        from sdflow.runtime.sessions.bound import Bound

        prepare, run, names = Bound._prepare, Bound._run, self._names
        seen = set[int]()

        def noting_prepare(bound: Bound) -> None:
            with self.span(f"trial run of {names.get(id(bound.session))}"):
                prepare(bound)

        def noting_run(bound: Bound) -> None:
            if id(bound) in seen:
                run(bound)
                return
            seen.add(id(bound))
            with self.span(f"first run of {names.get(id(bound.session))}"):
                run(bound)

        Bound._prepare, Bound._run = noting_prepare, noting_run  # type: ignore[method-assign]


def _told(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """What a call is about: a part of a graph, a submodel, a companion's folder, a kernel."""
    graph = named.get("graph") or next((each for each in arguments if hasattr(each, "graph")), None)
    said = [] if graph is None else [getattr(getattr(graph, "graph", None), "name", "")]
    for each in arguments:
        path = getattr(each, "_model", each)
        if hasattr(path, "parent") and path.name.endswith(".onnx"):
            said.append(path.parent.name)
        elif hasattr(path, "parent"):
            said.append(path.name)
        elif isinstance(each, str):
            said.append(each.rpartition("/")[2])
    return " ".join(dict.fromkeys(filter(None, said)))[:60]
