"""Pipelines in OCI registries, as CNCF's ModelPack has models there: `sdflow push` and `sdflow pull`."""

from sdflow.oci.pull import Pulled, pull
from sdflow.oci.push import Pushed, push
from sdflow.oci.reference import Reference, parse_oci

__all__ = ["Pulled", "Pushed", "Reference", "parse_oci", "pull", "push"]
