"""Twenty requests with one long prefix at once: prompt tokens computed with and without single flight.

The real cores of scheduler and KV manager in one thread, with the scripted worker of the simulator.
Run: python benchmarks/single_flight.py
"""

from __future__ import annotations

import argparse
import time

from octavo.scheduler.core_settings import CoreSettings
from octavo.simulator.step_cluster import StepCluster

VOCAB_SIZE = 50_000


def run(num_requests: int, num_prefix_tokens: int, timeout_s: float, budget: int) -> tuple[int, int, float]:
    """Prompt tokens computed, steps, and seconds of CPU for all of it."""
    cluster = StepCluster(
        num_blocks=8192,
        block_size=16,
        max_num_seqs=64,
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        settings=CoreSettings(max_num_batched_tokens=budget, single_flight_timeout_s=timeout_s),
    )
    prefix = [(7 * place + 1) % VOCAB_SIZE for place in range(num_prefix_tokens)]
    prompts = [[*prefix, *range(100 * number, 100 * number + 40)] for number in range(num_requests)]
    start = time.process_time()
    requests = [cluster.submit(prompt, max_tokens=16) for prompt in prompts]
    cluster.run()
    seconds = time.process_time() - start
    cluster.assert_idle()
    computed = sum(len(prompt) - cluster.cached_tokens[one] for prompt, one in zip(prompts, requests, strict=True))
    return computed, cluster.core.stats.num_steps, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prefix", type=int, default=1500)
    arguments = parser.parse_args()
    print(f"{arguments.requests} requests at once: {arguments.prefix} tokens that they share, 40 of their own\n")
    print("| tokens a step | | prompt tokens computed | steps | s of CPU |\n|---:|---|---:|---:|---:|")
    for budget in (2048, 8192, 32_768):
        for name, timeout_s in (("each for itself", 0.0), ("single flight", 5.0)):
            computed, num_steps, seconds = run(arguments.requests, arguments.prefix, timeout_s, budget)
            print(f"| {budget:,} | {name} | {computed:,} | {num_steps} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
