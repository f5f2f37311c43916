"""The denoising loop: the schedule as a matrix, the denoiser whole or in parts, ControlNets."""
