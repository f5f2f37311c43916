"""A server of built pipelines: requests of different kinds share the runs of the denoiser."""
