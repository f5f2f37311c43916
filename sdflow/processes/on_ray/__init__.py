"""The steps of a run on the machines of a Ray cluster: `sdflow run --on ray`."""
