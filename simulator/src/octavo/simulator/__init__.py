"""Runs the real cores in one process, in virtual time, with links and services that fail."""
