"""HTTP server for built pipelines. Requests of different kinds share denoiser runs."""
