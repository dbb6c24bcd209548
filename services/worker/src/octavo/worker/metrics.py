"""The worker's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

STEP_SECONDS = Histogram(
    "octavo_worker_step_seconds",
    "Time from the start of a step to its last token.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
IDLE_SECONDS = Counter("octavo_worker_idle_seconds", "Time in which the worker had no plan to run.")
TOKENS = Counter("octavo_worker_tokens", "Tokens computed (prefill, decode) and sampled.", ["kind"])
PREFILL_TOKENS, DECODE_TOKENS, SAMPLED_TOKENS = (TOKENS.labels(kind) for kind in ("prefill", "decode", "sampled"))
NOT_FINITE_TOKENS = Counter("octavo_worker_not_finite_tokens", "Samples refused because their logits were not finite.")
OPEN_SLOTS = Gauge("octavo_worker_open_slots", "Slots that held a sequence in the last step.")
TRANSFERRED_BYTES = Counter(
    "octavo_worker_transferred_bytes", "K and V copied between device and host memory.", ["direction"]
)
for _direction in ("to_host", "to_device"):
    TRANSFERRED_BYTES.labels(_direction)  # is there before the first copy, at 0
REFUSED_PLANS = Counter("octavo_worker_refused_plans", "Plans that were refused.", ["reason"])
