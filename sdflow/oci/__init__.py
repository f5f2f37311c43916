"""Pushes and pulls pipelines to and from OCI registries in CNCF's ModelPack format."""

from sdflow.oci.pull import Pulled, pull
from sdflow.oci.push import Pushed, push
from sdflow.oci.reference import Reference, parse_oci

__all__ = ["Pulled", "Pushed", "Reference", "parse_oci", "pull", "push"]
