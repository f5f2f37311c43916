"""Components from elsewhere: another VAE or denoiser, ControlNets, IP-Adapters."""
