"""Run steps on the nodes of a Ray cluster: `sdflow run --on ray`."""
