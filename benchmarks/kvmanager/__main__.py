"""What the KV manager's core costs, without any transport. Run: python benchmarks/kvmanager

Every pool is full of cached content with a key, so every allocation evicts. Times are back to back, in one thread.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

from load import BLOCK_SIZE, Load

from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import PoolSettings

POOLS = (10_000, 100_000, 1_000_000)
SEQUENCES = (64, 256, 1024)
LONG_PROMPT = 16_384
NUM_STEPS = 40
"""Decode steps until the sequences begin anew: so many fit the smallest pool."""


def p50_and_p99_us(seconds: Iterable[float]) -> str:
    micros = sorted(one * 1e6 for one in seconds)
    return f"{statistics.median(micros):.0f} / {micros[min(len(micros) - 1, len(micros) * 99 // 100)]:.0f}"


def busy_pool(num_blocks: int, num_sequences: int, settings: PoolSettings | None = None) -> Load:
    load = Load(num_blocks, num_sequences, settings)
    load.fill_cache()
    load.start_decoding(num_sequences)
    load.decode()
    gc.collect()
    gc.freeze()
    return load


def steps_of(load: Load, num_rounds: int) -> Iterator[float]:
    for _ in range(num_rounds):
        yield from (load.decode() for _ in range(NUM_STEPS))
        load.restart_decoding()


def decode_steps(num_rounds: int) -> None:
    print("\n## One decode step's message, p50 / p99 µs\n")
    print("| blocks | " + " | ".join(f"{number} sequences" for number in SEQUENCES) + " |")
    print("|" + "---:|" * (len(SEQUENCES) + 1))
    for num_blocks in POOLS:
        cells = []
        for num_sequences in SEQUENCES:
            cells.append(p50_and_p99_us(steps_of(busy_pool(num_blocks, num_sequences), num_rounds)))
            gc.unfreeze()
        print(f"| {num_blocks:,} | " + " | ".join(cells) + " |", flush=True)


def long_prompts(times: int) -> None:
    print(f"\n## A prompt of {LONG_PROMPT:,} tokens in a pool of 100,000 blocks, p50 / p99 µs\n")
    names = ["arrival", "hashing, longest slice", "hashing", "admission", "publication", "release", "in all"]
    print("| | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for algorithm in ("sha256", "xxh3_128"):
        load = busy_pool(100_000, 256, PoolSettings(hash_algorithm=algorithm))
        hot = load.fresh(LONG_PROMPT)
        load.prompt(hot)
        for kind in ("cold", "hot"):
            runs = [load.prompt(hot if kind == "hot" else load.fresh(LONG_PROMPT)) for _ in range(times)]
            cells = [p50_and_p99_us(run[name] for run in runs) for name in names]
            print(f"| {kind}, {algorithm} | " + " | ".join(cells) + " |", flush=True)


def other_messages(times: int) -> None:
    load = busy_pool(55_712, 256)
    print("\n## Others, 256 sequences in a pool of 55,712 blocks, p50 / p99 µs\n")
    short = load.fresh(4096)
    load.prompt(short)
    rows: list[tuple[str, Callable[[], float]]] = [
        ("decode step, encoded and decoded, with its answer", load.encode_and_decode),
        ("decode step, one end and one new prompt of 200 tokens", load.decode_with_turnover),
        ("admission of 4,096 tokens, hashed, nothing cached", lambda: load.prompt(load.fresh(4096))["admission"]),
        ("admission of 4,096 tokens, hashed, all cached", lambda: load.prompt(short)["admission"]),
    ]
    print("| message | µs |\n|---|---:|")
    for name, measure in rows:
        print(f"| {name} | {p50_and_p99_us(measure() for _ in range(times))} |", flush=True)
    assert violations(load.pool) == []


def bytes_per_block(num_blocks: int) -> tuple[float, float]:
    """Of a pool with every block cached: by the allocator, and by the growth of the process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    load = Load(num_blocks, 1)
    load.fill_cache()
    gc.collect()
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert load.pool.blocks.counts().cached == num_blocks
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return allocated / num_blocks, grown / num_blocks


def memory() -> None:
    print(f"\n## Bytes per block of {BLOCK_SIZE} tokens, every block hashed\n")
    print("| blocks | bytes |\n|---:|---:|")
    for num_blocks in POOLS:
        command = [sys.executable, __file__, "--bytes-per-block", str(num_blocks)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--bytes-per-block", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bytes_per_block:
        allocated, _ = bytes_per_block(arguments.bytes_per_block)
        print(f"| {arguments.bytes_per_block:,} | {allocated:.0f} |")
        return
    print(f"{platform.machine()}, Python {platform.python_version()}")
    factor = 1 if arguments.quick else 4
    decode_steps(3 * factor)
    long_prompts(20 * factor)
    other_messages(50 * factor)
    memory()


if __name__ == "__main__":
    main()
