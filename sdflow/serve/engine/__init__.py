"""The engine: images at different steps share denoiser runs."""
