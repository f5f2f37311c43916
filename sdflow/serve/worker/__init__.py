"""The worker process, which generates images, and the server's connection to it."""
