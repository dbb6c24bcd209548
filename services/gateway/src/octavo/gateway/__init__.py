"""Octavo's OpenAI-compatible HTTP server: owns connections, tokenization and everything the client sees as text."""
