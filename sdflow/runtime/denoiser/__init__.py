"""The denoising loop: the scheduler as a matrix, whole and split denoisers, ControlNets."""
