"""What a node refuses before it begins, and the places that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.machine.packages import distribution_version
from sdflow.processes.on_ray.cluster import ray_address
from sdflow.processes.on_ray.group import Announcements, run_step


def refused(request: dict[str, str], versions: dict[str, str]) -> dict[str, str]:
    answer = run_step("sdflow.passes.worker", request, {}, (), versions, None, "a step")
    error: dict[str, str] = answer["error"]
    return error


def test_a_node_with_other_packages_refuses_and_names_them(tmp_path: Path) -> None:
    versions = {"numpy": "0.0.1", "onnx": distribution_version("onnx"), "not-there": "1"}
    error = refused({"out": str(tmp_path)}, versions)
    assert f"numpy 0.0.1 is required, but {distribution_version('numpy')} is installed" in error["what"]
    assert "not-there 1 is required, but none is installed" in error["what"]
    assert "onnx " not in error["what"]


def test_a_node_that_does_not_see_the_cache_says_so(tmp_path: Path) -> None:
    error = refused({"out": str(tmp_path / "elsewhere")}, {"numpy": distribution_version("numpy")})
    assert error["where"] == str(tmp_path / "elsewhere")
    assert "the same path" in error["remedy"]


def test_what_steps_announce_is_kept_in_order_and_of_memory_the_last() -> None:
    told = Announcements()
    for kind, value in (("phase", "a"), ("memory", 1), ("memory", 2), ("phase", "b")):
        told.put("one", kind, value)
    told.put("other", "phase", "c")
    assert told.take("one") == [("phase", "a"), ("memory", 2), ("phase", "b")]
    assert told.take("one") == []
    assert told.take("other") == [("phase", "c")]


@pytest.mark.parametrize("on", ["mars", "ray://", "http://host:1"])
def test_a_place_that_is_none_is_refused_with_those_that_are(on: str) -> None:
    with pytest.raises(UsageError, match="is not a Ray cluster") as raised:
        ray_address(on)
    assert "ray://HOST:PORT" in str(raised.value.remedy)


def test_the_clusters_of_this_machine_and_of_others_have_addresses() -> None:
    assert ray_address("ray") == "auto"
    assert ray_address("ray://head:10001") == "ray://head:10001"
