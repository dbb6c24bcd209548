"""Readers of the ways in which models write calls of tools."""
