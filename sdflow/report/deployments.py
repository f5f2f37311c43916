"""Output of `sdflow deploy` and `sdflow status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sdflow.report.output import print_json, print_table, put
from sdflow.serve.deployments import Deployment


def print_deployments(found: Sequence[Deployment], *, as_json: bool = False) -> None:
    """A table of deployments, or everything as JSON."""
    if as_json:
        listed = [{**asdict(each), "running": each.running, "state": each.state} for each in found]
        print_json("deployments", {"deployments": listed})
        return
    if not found:
        put("nothing is deployed")
        return
    rows = [
        (each.name, each.state, each.url, str(each.pid), ", ".join(each.pipelines), each.version, each.log)
        for each in found
    ]
    print_table("", ("name", "state", "address", "pid", "pipelines", "version", "log"), rows, right=("pid",))
