"""Whether a pipeline fits a device's memory, by arithmetic, before anything is built."""
