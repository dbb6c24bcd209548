"""A GGUF file of a few kilobytes, written as llama.cpp's converter writes one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 8, 2, 2, 1, 4, 12
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
CONTROL = ["<|end|>", "<|start|>"]


def byte_letters() -> list[str]:
    """The 256 letters of a byte-level vocabulary, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def interleave_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k: row 0 of the first half, row 0 of the second half, row 1..."""
    return rows.reshape(num_heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


@dataclass
class TinyGguf:
    """`weights` are as Hugging Face orders them, by their GGUF names."""

    architecture: str = "llama"
    tied: bool = True
    add_bos: bool = False
    pre_tokenizer: str = "smollm"
    left_out: tuple[str, ...] = ()
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1234.0)
        tokens = [*CONTROL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(self.add_bos)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        self.weights = self._random_weights(len(tokens))
        for name, weight in self.weights.items():
            if name not in self.left_out:
                writer.add_tensor(name, self._as_stored(name, weight))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _as_stored(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.architecture == "llama" and "attn_q." in name:
            return interleave_halves(weight, HEADS)
        if self.architecture == "llama" and "attn_k." in name:
            return interleave_halves(weight, KV_HEADS)
        return weight

    def _random_weights(self, vocab_size: int) -> dict[str, NDArray[np.float32]]:
        draw = np.random.default_rng(7)
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (vocab_size, HIDDEN),
            "output_norm.weight": (HIDDEN,),
        }
        if not self.tied:
            shapes["output.weight"] = (vocab_size, HIDDEN)
        for layer in range(LAYERS):
            shapes |= {
                f"blk.{layer}.attn_norm.weight": (HIDDEN,),
                f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
                f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
                f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
                f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
                f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
            }
        return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
