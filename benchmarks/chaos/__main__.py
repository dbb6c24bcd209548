"""Kills, replaces and soaks the services of one machine under load, and prints what clients saw of it.

    python -m benchmarks.chaos [--model FOLDER] deaths --rounds 5
    python -m benchmarks.chaos [--model FOLDER] chaos --seconds 180 --gap 2 5
    python -m benchmarks.chaos [--model FOLDER] soak --seconds 600

Every answer is compared with the undisturbed one. Exit status 1: a request failed that no dead gateway had, an answer
differs, or something is left afterwards. The model should be small and of float32 on a CPU, so that greedy answers have
no near ties: without --model it is the default one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from chaos.deaths import HEADER, at_random, one_at_a_time
from chaos.load import Question, Tally, ask, client, mixed_load, questions
from chaos.system import SERVICES, DrillError, Footprint, System

OPTIONS = ["--max-num-seqs", "16", "--block-size", "8"]
_SOAK_SAMPLES = 12


async def undisturbed(http: httpx.AsyncClient, asked: list[Question]) -> dict[Question, list[list[int]]]:
    """The answers, each question by itself."""
    known = {}
    for question in asked:
        outcome = await ask(http, question)
        if outcome.error:
            raise DrillError(f"no answer without a death: {outcome.error}")
        known[question] = outcome.answer
    return known


def judge(tally: Tally) -> bool:
    """Print what the clients saw. Whether all went well."""
    p50, p99, longest = np.quantile(tally.pauses_s or [0.0], (0.5, 0.99, 1.0))
    print(f"answered {tally.num_answered}, left on purpose {tally.num_left}, of dead gateways {tally.num_cut}")
    print(f"failed {len(tally.failures)}, wrong {len(tally.wrong)}, another by rounding {tally.num_near_ties}")
    print(f"longest pause of a request: p50 {p50:.2f} s, p99 {p99:.2f} s, at most {longest:.2f} s")
    for text in [*tally.failures[:5], *tally.wrong[:5]]:
        print(f"  {text[:400]}")
    return not tally.failures and not tally.wrong


async def soak(
    system: System, http: httpx.AsyncClient, known: dict[Question, list[list[int]]], clients: int, seconds: float
) -> bool:
    """Mixed load; memory and open files are looked at between its parts, when nothing runs."""
    samples: list[dict[str, Footprint]] = []
    total, began = Tally(), time.monotonic()
    is_open = asyncio.Event()
    is_open.set()
    for part in range(_SOAK_SAMPLES):
        tally = await mixed_load(http, known, clients, seconds / _SOAK_SAMPLES, 0.2, part, is_open)
        tally.failures += ["the connection broke"] * tally.num_cut
        total.add(tally)
        await system.wait_until_clean()
        samples.append(system.footprints())
    print(f"\n{time.monotonic() - began:.0f} s of mixed load")
    is_good = judge(total)
    first_at, middle_at = 1, len(samples) // 2
    print(f"\n| service | MB after part {first_at + 1} | part {middle_at + 1} | part {len(samples)} | open files |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for service in samples[0]:
        first, middle, last = (samples[at][service] for at in (first_at, middle_at, -1))
        sizes = [f"{sample.resident_bytes / 1e6:.1f}" for sample in (first, middle, last)]
        print(f"| {service} | {' | '.join(sizes)} | {first.num_files}, {middle.num_files}, {last.num_files} |")
        is_good = is_good and last.num_files <= first.num_files + 2
        is_good = is_good and last.resident_bytes < 1.1 * middle.resident_bytes
    return is_good


async def drill(arguments: argparse.Namespace, system: System, vocab_size: int) -> bool:
    print(f"ready after {await system.wait_until_ready():.1f} s", flush=True)
    rng = random.Random(arguments.seed)
    async with client(system.url) as http:
        if arguments.drill == "deaths":
            tokens, count = arguments.tokens, arguments.clients
            asked = [
                Question(tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice([9, 33, 100]))), tokens)
                for _ in range(count)
            ]
            known = await undisturbed(http, asked)
            found = await one_at_a_time(system, http, known, arguments.rounds, arguments.services)
            print(f"\n{HEADER}")
            for deaths in found:
                print(deaths.row())
            for deaths in found:
                for failure in deaths.failures[:3]:
                    print(f"  {deaths.service}: {failure[:400]}")
            return not any(deaths.failures for deaths in found)
        known = await undisturbed(http, questions(rng, 24, arguments.tokens, vocab_size))
        if arguments.drill == "soak":
            return await soak(system, http, known, arguments.clients, arguments.seconds)
        tally, num_kills = await at_random(
            system, http, known, arguments.clients, arguments.seconds, tuple(arguments.gap), arguments.seed
        )
        print(f"\n{arguments.seconds:.0f} s, killed: {', '.join(f'{n} x {s}' for s, n in num_kills.items())}")
        print(f"answered for each kill: {tally.num_answered / max(1, num_kills.total()):.0f}")
        return judge(tally)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", choices=["deaths", "chaos", "soak"])
    parser.add_argument("--model", type=Path, help="folder of a model; default: the one that `octavo serve` takes")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=SERVICES, help="whose deaths")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of death")
    parser.add_argument("--seconds", type=float, default=180.0, help="of load")
    parser.add_argument("--gap", type=float, nargs=2, default=(2.0, 5.0), help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=300, help="of the longest answers")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        command = [sys.executable, "-m", "octavo.cli.main", "model", "path"]
        model = Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    # Books that are checked after each message halve the rate. At random moments the number of requests is what tells;
    # the books are checked at the end.
    with System(model, OPTIONS, check_ledger=arguments.drill != "chaos") as system:
        try:
            is_good = asyncio.run(drill(arguments, system, vocab_size))
        except DrillError as error:
            print(error)
            is_good = False
        if not is_good:
            print(f"\nlast lines of the log:\n{system.log[-3000:]}", file=sys.stderr)
    raise SystemExit(0 if is_good else 1)


if __name__ == "__main__":
    main()
