"""Our own decoders, and what they read from a model folder."""
