"""Prints results: tables for people, JSON with a `format_version` for programs. Standard output only."""
