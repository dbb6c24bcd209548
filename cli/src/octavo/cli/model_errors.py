"""What can be wrong with a model argument. Every message says what to do.

ModelError
├── ModelNotFoundError       nothing there, or the hub cannot be reached
├── IncompleteModelError     a folder or a download that lacks something
├── UnsupportedModelError    an architecture, tokenizer or file format that Octavo does not run
└── ModelCacheError          the folder for models cannot be written
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of the errors that `octavo serve` prints without a traceback."""


class ModelNotFoundError(ModelError):
    pass


class IncompleteModelError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class ModelCacheError(ModelError):
    pass
