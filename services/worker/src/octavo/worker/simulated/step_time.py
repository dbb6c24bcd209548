"""How long a step takes on the device of a profile: a roofline for each kind of kernel, and the cost of launches."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.worker.simulated.profile import Profile

_NUM_PRODUCTS = 4
"""Matrix products of a layer: qkv, output, gate and up, down."""
_NUM_OTHERS = 4
"""Other launches of a layer: two norms, the gate, storing K and V."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    num_tokens: int = 0
    """Rows of the matrix products of the layers."""
    num_logits: int = 0
    """Rows of the output layer."""
    decode_context: int = 0
    """Tokens whose K and V rows of one token read, those of a shared prefix once."""
    prefill_context: int = 0
    """The same of rows of several tokens."""
    prefill_pairs: int = 0
    """Pairs of a query and a key in rows of several tokens."""
    num_copied_blocks: int = 0
    block_size: int = 16


def step_seconds(profile: Profile, work: StepWork, num_gpus: int = 1) -> float:
    """The time of one step, its work spread evenly over GPUs that each hold the whole model."""
    model, device = profile.model, profile.device
    tokens, logits = work.num_tokens / num_gpus, work.num_logits / num_gpus
    copied_bytes = 2 * work.num_copied_blocks * work.block_size * model.kv_token_bytes / num_gpus
    seconds = copied_bytes / device.bytes_per_s
    if not work.num_tokens:
        return seconds
    launches_us = device.step_us
    if not (work.num_tokens == 1 and device.single_row_overlaps):
        of_layer = _NUM_PRODUCTS * device.product_launch_us + _NUM_OTHERS * device.other_launch_us
        launches_us += model.num_layers * of_layer
    seconds += launches_us * 1e-6 + _products_s(profile, tokens, logits) + _activations_s(profile, tokens, logits)
    if work.decode_context:
        read_s = work.decode_context * model.kv_token_bytes / num_gpus / device.bytes_per_s
        seconds += model.num_layers * device.attention_launch_us * 1e-6 + read_s
    if work.prefill_pairs:
        seconds += model.num_layers * device.attention_launch_us * 1e-6 + _prefill_attention_s(profile, work, num_gpus)
    return seconds


def _products_s(profile: Profile, tokens: float, logits: float) -> float:
    model, device = profile.model, profile.device
    layers, output = model.num_layers * model.layer_params, model.hidden_size * model.vocab_size
    read = (layers + (output if logits else 0)) * model.weight_bytes / device.bytes_per_s
    computed = 2 * (layers * tokens + output * logits) / device.flops_per_s
    return float((read**device.corner + computed**device.corner) ** (1 / device.corner))


def _activations_s(profile: Profile, tokens: float, logits: float) -> float:
    """What norms, gates and sampling read and write: a layer's gate three times its width, its norms nine times."""
    model = profile.model
    of_token = model.num_layers * (3 * model.intermediate_size + 9 * model.hidden_size) * model.weight_bytes
    of_logits = 2 * model.vocab_size * model.weight_bytes
    return (of_token * tokens + of_logits * logits) / profile.device.bytes_per_s


def _prefill_attention_s(profile: Profile, work: StepWork, num_gpus: int) -> float:
    """A multiply-add each for scores and values; short rows on long contexts are bound by reading K and V."""
    model, device = profile.model, profile.device
    flops = 4 * model.num_layers * model.num_heads * model.head_dim * work.prefill_pairs
    read_s = work.prefill_context * model.kv_token_bytes / device.bytes_per_s
    return max(flops / device.prefill_attention_flops_per_s, read_s) / num_gpus
