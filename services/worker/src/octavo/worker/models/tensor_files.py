"""Reads tensors of safetensors files into memory of any device, by several threads. Pickled files are never opened."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.worker.models.errors import ModelLoadError, name_some

INDEX = "model.safetensors.index.json"
STAGING_BYTES = 16 * 2**20
"""Of each of a thread's two buffers: one is filled from the file while the other is copied to the device."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    path: Path
    descriptor: int
    offset: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: Shape


@contextmanager
def open_tensor_files(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """All tensors of the model folder by name; its files stay open until the end. Raises ModelLoadError."""
    with ExitStack() as stack:
        found: dict[str, StoredTensor] = {}
        for path in tensor_paths(folder):
            try:
                with safe_open(path, framework="pt"):  # checks the header against the file
                    pass
                descriptor = os.open(path, os.O_RDONLY)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
            stack.callback(os.close, descriptor)
            found |= _stored_tensors(path, descriptor)
        yield found


def tensor_paths(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all of them in it. Raises ModelLoadError."""
    index = folder / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} cannot be read: {error!r}") from error
        if odd := {str(name) for name in names if not _is_beside(name)}:
            raise ModelLoadError(f"{index} names files that are no safetensors files beside it: {name_some(odd)}")
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no *.safetensors file; other formats must be converted first")
    return files


def _is_beside(name: object) -> bool:
    """Whether an index names a file of its own folder, of the one format that is read."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") and "\0" not in name


def _stored_tensors(path: Path, descriptor: int) -> dict[str, StoredTensor]:
    """The header of a file that is known to be sound: its length, then JSON, then the tensors' bytes."""
    (header_bytes,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    header = json.loads(os.pread(descriptor, header_bytes, 8))
    header.pop("__metadata__", None)
    if odd := {f"{name} ({entry['dtype']})" for name, entry in header.items() if entry["dtype"] not in DTYPES}:
        raise ModelLoadError(f"{path} has tensors of types that are not read here: {name_some(odd)}")
    return {
        name: StoredTensor(
            path,
            descriptor,
            8 + header_bytes + entry["data_offsets"][0],
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }


class TensorReader:
    """Fills tensors from files through staging buffers, which each calling thread has for itself.

    On a GPU the buffers are pinned: a thread reads on while its last piece is copied. Copies are ordered on the
    current stream, so that what follows there sees whole tensors.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self._device, self._staging_bytes = device, staging_bytes
        self._of_thread = threading.local()

    def read(self, stored: StoredTensor, target: Tensor) -> None:
        """Fill `target`, dense and of the stored tensor's size, with conversion to its type. Raises ModelLoadError."""
        flat, size = target.view(-1), stored.dtype.itemsize
        if self._device.type == "cpu" and target.dtype == stored.dtype:
            _fill(flat, stored, stored.offset)
            return
        piece = self._staging_bytes // size
        for first in range(0, flat.numel(), piece):
            part = flat[first : first + piece]
            staged = self._next_buffer()[: part.numel() * size].view(stored.dtype)
            _fill(staged, stored, stored.offset + first * size)
            if self._device.type != "cuda":
                part.copy_(staged)
                continue
            on_device = staged if staged.dtype == part.dtype else staged.to(self._device, non_blocking=True)
            part.copy_(on_device, non_blocking=True)
            self._of_thread.copied[self._of_thread.turn].record(torch.cuda.current_stream(self._device))

    def _next_buffer(self) -> Tensor:
        """The thread's next buffer, uint8, once the copy that last used it has ended."""
        own = self._of_thread
        if not hasattr(own, "buffers"):
            is_gpu, own.turn = self._device.type == "cuda", 0
            own.buffers = [
                torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(1 + is_gpu)
            ]
            own.copied = [torch.cuda.Event() for _ in own.buffers] if is_gpu else []  # type: ignore[no-untyped-call]
        own.turn = (own.turn + 1) % len(own.buffers)
        if own.copied:
            own.copied[own.turn].synchronize()
        buffer: Tensor = own.buffers[own.turn]
        return buffer


def _fill(memory: Tensor, stored: StoredTensor, offset: int) -> None:
    """Read the file from `offset` on into `memory`, on the host and of one dimension, without the lock of Python."""
    left = memoryview(memory.view(torch.uint8).numpy().data)
    while left:
        try:
            num_read = os.preadv(stored.descriptor, [left], offset)
        except OSError as error:
            raise ModelLoadError(f"{stored.path} cannot be read: {error}") from error
        if not num_read:
            raise ModelLoadError(f"{stored.path} became shorter while it was read")
        left, offset = left[num_read:], offset + num_read
