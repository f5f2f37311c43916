"""The engine: images at different steps share runs of the denoiser."""
