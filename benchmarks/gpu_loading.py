"""Measures how fast a checkpoint reaches the GPU, and how long a worker takes until it is ready.

    python benchmarks/gpu_loading.py [--folder DIR] [--layers N] [--hidden N] [--device NAME] [--skip-worker]

Writes a checkpoint of random weights, of the shape of Llama-3.1-8B unless told otherwise, in several shards to DIR (by
default /dev/shm if it has room, else the temporary folder). Loads it twice, so that the second time finds it in the
page cache for certain, and compares tensors with what was written. Then loads it as a worker does, up to ready.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from workloads import LLAMA_8B

from octavo.worker.config import WorkerConfig
from octavo.worker.loading import load_core
from octavo.worker.models.config import read_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.linear import PlainLinear
from octavo.worker.models.weights import expected_tensors, load_decoder

DTYPE = torch.bfloat16
SHARD_BYTES = 4 * 2**30
GB = 1e9
ROOM = 1.1


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--hidden", type=int, default=LLAMA_8B["hidden_size"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-worker", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = {**LLAMA_8B, "num_hidden_layers": arguments.layers, "hidden_size": arguments.hidden}
    num_bytes = _num_bytes(config)
    with tempfile.TemporaryDirectory(dir=arguments.folder or _roomy_folder(num_bytes)) as name:
        folder = Path(name)
        started = time.perf_counter()
        num_shards = _write(folder, config, device)
        print(
            f"wrote {num_bytes / GB:.1f} GB in {num_shards} shards to {folder}: {time.perf_counter() - started:.1f} s"
        )
        for attempt in (1, 2):
            _load(folder, device, num_bytes, attempt)
        if not arguments.skip_worker:
            _start_worker(folder, arguments.device)


def _num_bytes(config: dict[str, object]) -> int:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        shapes = expected_tensors(read_model_config(Path(name)))
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * DTYPE.itemsize


def _roomy_folder(num_bytes: int) -> str | None:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM * num_bytes else None


def _made(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The same for the same name, on the same device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=DTYPE, device=device)


def _write(folder: Path, config: dict[str, object], device: torch.device) -> int:
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for index, names in enumerate(_shards(expected_tensors(read_model_config(folder)))):
        shard = f"model-{index:05}.safetensors"
        save_file({name: _made(name, shape, device).cpu() for name, shape in names.items()}, folder / shard)
        places |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return len(set(places.values()))


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        shard[name] = shape
        size += torch.Size(shape).numel() * DTYPE.itemsize
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _load(folder: Path, device: torch.device, num_bytes: int, attempt: int) -> None:
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    shares: list[float] = []
    started = time.perf_counter()
    decoder = load_decoder(folder, DTYPE, device, shares.append)
    seconds = time.perf_counter() - started
    same = _compare(decoder, device)
    peak = f", peak on the GPU {torch.cuda.max_memory_allocated(device) / GB:.2f} GB" if is_gpu else ""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"load {attempt}: {seconds:.2f} s, {num_bytes / GB / seconds:.1f} GB/s{peak}, peak of the process "
        f"{host / GB:.1f} GB, {len(shares)} reports of progress up to {shares[-1]:.0%}; {same} tensors as written"
    )
    del decoder
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()


def _compare(decoder: Decoder, device: torch.device) -> int:
    """Compare the first and the last layer, the embedding and the output. Returns how many tensors were the same."""
    shapes = expected_tensors(decoder.config)
    assert isinstance(decoder.output, PlainLinear)
    joined = {("model.embed_tokens.weight",): decoder.embedding, ("lm_head.weight",): decoder.output.weight}
    for index in (0, len(decoder.layers) - 1):
        layer, prefix = decoder.layers[index], f"model.layers.{index}."
        assert isinstance(layer.qkv, PlainLinear)
        assert isinstance(layer.gate_up, PlainLinear)
        joined[tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")] = layer.qkv.weight
        joined[tuple(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))] = layer.gate_up.weight
        joined[(f"{prefix}post_attention_layernorm.weight",)] = layer.mlp_norm
    for names, found in joined.items():
        if not torch.equal(found, torch.cat([_made(name, shapes[name], device) for name in names])):
            raise SystemExit(f"{', '.join(names)} was loaded wrongly")
    return sum(len(names) for names in joined)


def _start_worker(folder: Path, device: str) -> None:
    """From the start of loading to ready, and when each state of its progress began."""
    started = time.perf_counter()
    states: dict[str, float] = {}
    config = WorkerConfig(listen="frames:///tmp/unused.sock", model=folder, device=device)  # type: ignore[arg-type]

    def note(text: str) -> None:
        states.setdefault(text.rstrip("0123456789 %"), time.perf_counter())

    load_core(config, note)
    ready = time.perf_counter()
    for (state, begun), ended in zip(states.items(), [*list(states.values())[1:], ready], strict=True):
        print(f"  {ended - begun:6.2f} s  {state}")
    print(f"ready {ready - started:.1f} s after the start of loading")


if __name__ == "__main__":
    main()
