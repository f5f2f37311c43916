"""Fixtures of the whole test suite; nothing that runs in it may reach the network or report anything."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator

import psutil
import pytest

os.environ.update(
    CI="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    OLIVE_DISABLE_TELEMETRY="1",
    ORT_DISABLE_TELEMETRY="1",
)

# Workers run side by side; more threads than cores slow a small model down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SDFLOW_CACHE"] = "cache"  # of the folder that a test works in, not the user's
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the core that they wait for

import hypothesis
from converted import converted  # noqa: F401
from forked_workers import forked_workers  # noqa: F401
from kept_builds import cache_of  # noqa: F401
from one_thread import one_thread_by_default
from small_workflows import bench, chain  # noqa: F401
from started_python import sdflow, started_python  # noqa: F401
from tiny_pipeline import tiny_artifacts, tiny_checkpoint, tiny_pipeline, tiny_torch  # noqa: F401

# No example fails for being slow: machines are. The same examples each time; others with `--hypothesis-profile default`.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

LONGEST_FILES = (
    "test_terminal", "test_walk", "test_webgpu", "test_main_job", "test_flux2_job", "test_stable_diffusion_3_job",
    "test_z_image_job", "test_one_file", "test_bench", "test_other_family_job", "test_flux_job", "test_verify",
    "test_signals", "test_streamed", "test_equality", "test_folder", "test_onnx_pipeline", "test_components",
    "test_klein_sample", "test_watchdog", "test_exact", "test_docs", "test_stable_diffusion_3_targets", "test_flux_targets",
    "test_bench_on_webgpu", "test_operators", "test_samplers", "test_once", "test_new_batch_sizes",
    "test_evaluate", "test_loras", "test_init", "test_structure_and_weights", "test_inputs_that_change", "test_control",
    "test_few_steps", "test_ort_transformers_optimization", "test_memory_limit", "test_lanes", "test_families",
    "test_generate", "test_tune", "test_faults", "test_openai_client", "test_fuzz", "test_kills", "test_pins", "test_deploy",
)  # fmt: skip
"""Begun first: who has one of them left at the end works alone."""


OBJECTS_TO_A_COLLECTION = 10_000
"""Python's default of 700 costs a tenth of the processor time of tests that mostly run Python."""


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("once"):
        name, *index = mark.args
        if item.callspec.indices[name] != (index[0] if index else 0):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and collected is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no collection of garbage looks at it again, also not in processes that
    tests fork, whose memory stays shared."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_TO_A_COLLECTION)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    one_thread_by_default()


@pytest.fixture(scope="session", autouse=True)
def digests_of_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `generate` notes of the files that it read lies in the tests' own folder."""
    os.environ["SDFLOW_DIGESTS"] = str(tmp_path_factory.mktemp("digests"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that the test starts end at SIGINT, also where the shell ignores it for what it runs (`nohup`, `&`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def children() -> Callable[..., list[psutil.Process]]:
    """Asks for the processes that this one has started since the test began. Earlier ones stay: torch.compile keeps a pool,
    multiprocessing a tracker."""
    me = psutil.Process()
    before = set(me.children(recursive=True))

    def since(recursive: bool = False) -> list[psutil.Process]:
        return [each for each in me.children(recursive=recursive) if each not in before]

    return since
