"""The table of what Octavo reaches on a GPU, each line with its share of the limit measured in the same run.

    python benchmarks/gpu_figures.py

Runs gpu_serving.py (HTTP and four processes), gpu_engine.py (one process) and gpu_kernels.py. About five minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_limits import Figure
from rich.console import Console
from rich.table import Table

SCRIPTS = {
    "gpu_serving.py": ["L1", "L64", "W1", "W2", "W3"],
    "gpu_engine.py": ["W1", "S256", "--no-check"],  # the same kernels as those that gpu_serving has checked
    "gpu_kernels.py": [],
}


def run(script: str, arguments: list[str]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.jsonl"
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments, "--figures", str(path)]
        subprocess.run(command, check=True)
        return [Figure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def against_one_process(four: list[Figure], one: list[Figure]) -> Figure:
    """W1's rate of four processes over that of one, which is its limit."""
    rates = [next(figure.value for figure in figures if figure.name == "W1 output") for figures in (four, one)]
    return Figure("W1, four processes against one", rates[0] / rates[1], "", rates[0] / rates[1])


def table_of(found: dict[str, list[Figure]]) -> Table:
    table = Table("measured by", "figure", "value", "unit", "share of the limit", title="One GPU, Llama-3.1-8B's shape")
    for script, figures in found.items():
        for figure in figures:
            table.add_row(script, figure.name, f"{figure.value:,.2f}", figure.unit, f"{figure.share:.3f}")
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = {script: run(script, arguments) for script, arguments in SCRIPTS.items()}
    found["both"] = [against_one_process(found["gpu_serving.py"], found["gpu_engine.py"])]
    Console(width=120).print(table_of(found))


if __name__ == "__main__":
    main()
