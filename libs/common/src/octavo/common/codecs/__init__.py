"""Message values to protobuf bytes and back: the only code that knows both. One module per hop."""

from octavo.common.codecs.generation import GENERATE
from octavo.common.codecs.kv import KV_STEPS
from octavo.common.codecs.step import WORKER_STEPS

__all__ = ["GENERATE", "KV_STEPS", "WORKER_STEPS"]
