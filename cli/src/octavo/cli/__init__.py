"""The `octavo` command: prepare a model, serve it, talk to it, measure it."""
