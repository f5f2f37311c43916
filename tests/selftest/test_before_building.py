"""`sdflow selftest` looks whether the target is here before it builds anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from started_python import Command


@pytest.mark.skipif(sys.platform == "win32", reason="DirectML may be here")
def test_a_target_that_is_not_here_is_said_at_once_with_what_to_do(sdflow: Command, tmp_path: Path) -> None:
    done = sdflow("selftest", "--target", "directml", "--cache", "store", folder=tmp_path)
    assert done.returncode == 5
    assert done.stdout.startswith("directml: unavailable: directml: it runs on Windows only\n")
    assert "sdflow run shapes --target directml --copy" in done.stderr
    assert "sdflow selftest --pipeline shapes-directml" in done.stderr
    assert not (tmp_path / "store/v1/actions").exists(), "nothing was built"
    said = json.loads(sdflow("selftest", "--target", "directml", "--json", folder=tmp_path).stdout)
    assert (said["kind"], said["verdict"], said["build_seconds"]) == ("selftest", "unavailable", None)
