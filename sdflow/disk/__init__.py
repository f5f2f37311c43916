"""Files and folders on disk: atomic writes, replacement, locks, stamps."""
