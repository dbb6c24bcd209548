"""What every block of a pool holds, in a file that outlives the process.

The file is a shared memory mapping: what was written stays in the page cache when the process is killed, and no write
waits for a disk. Layout, little-endian: a header, the generation of each block as int32, then one record per block. A
record counts only if it names the block's present generation and its content hashes to its digest, so that handing a
block out anew voids its record, and a torn write is a miss.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import cast
from urllib.parse import quote
from zlib import crc32

import structlog

from octavo.common.block_hash import BlockKey
from octavo.common.messages.kv import OpenPool

log = structlog.get_logger()

_MAGIC = b"octcat02"
_HEADER = struct.Struct("<8sQQIII32s")
"""Magic, epoch, incarnation, number of blocks, block size, bytes of a record, fingerprint of the hash scheme."""
_HEADER_BYTES = 128
_EPOCH = struct.Struct("<Q")
_RECORD = struct.Struct("<iII48s")
"""Generation, CRC-32 of what follows, bytes of the key, key."""
_CHECKED = struct.Struct("<I48s")
_MAX_KEY_BYTES = 48


class Catalogue:
    """The file of one pool, mapped."""

    def __init__(self, mapping: mmap.mmap, opening: OpenPool, *, is_restored: bool) -> None:
        self.is_restored = is_restored
        """The file was there, of the same life of the pool."""
        self._mapping = mapping
        self._unwritten: list[tuple[int, int, BlockKey]] = []
        begin = _HEADER_BYTES
        self._records_begin = begin + 4 * opening.num_blocks
        self.generations = memoryview(mapping)[begin : self._records_begin].cast("i")
        """block_id |-> its generation. What is written here is in the file."""

    def note_epoch(self, epoch: int) -> None:
        """The pool was opened under this epoch."""
        _EPOCH.pack_into(self._mapping, len(_MAGIC), epoch)

    def put(self, block_id: int, key: BlockKey) -> None:
        """The block holds this, at its present generation. In the file after `write`."""
        self._unwritten.append((block_id, self.generations[block_id], key))

    def write(self) -> None:
        """Write the records that were put, off the way of a reply: one that is lost is a miss."""
        for block_id, generation, key in self._unwritten:
            check = crc32(_CHECKED.pack(len(key), key), generation)
            _RECORD.pack_into(self._mapping, self._begin(block_id), generation, check, len(key), key)
        self._unwritten.clear()

    def forget(self, block_id: int) -> None:
        """The block is found by its content no more."""
        self.write()
        begin = self._begin(block_id)
        self._mapping[begin : begin + _RECORD.size] = bytes(_RECORD.size)

    def key(self, block_id: int) -> BlockKey | None:
        """What the block holds, or None if that is not known for sure."""
        generation, check, num_bytes, key = _RECORD.unpack_from(self._mapping, self._begin(block_id))
        if not 0 < num_bytes <= _MAX_KEY_BYTES or generation != self.generations[block_id]:
            return None
        if check != crc32(_CHECKED.pack(num_bytes, key), generation):
            return None
        return cast(BlockKey, key[:num_bytes])

    def keys(self) -> dict[int, BlockKey]:
        """What is known of all blocks."""
        found: dict[int, BlockKey] = {}
        for block_id in range(len(self.generations)):
            key = self.key(block_id)
            if key is not None:
                found[block_id] = key
        return found

    def _begin(self, block_id: int) -> int:
        return self._records_begin + block_id * _RECORD.size


class CatalogueFolder:
    """The catalogues of one KV manager. Only one process at a time has the catalogue of a pool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: dict[str, int] = {}

    def epoch(self, pool_id: str) -> int:
        """The highest epoch that opened the pool, of any life of this service; 0 if none is known."""
        try:
            with self._path(pool_id).open("rb") as file:
                header = file.read(_HEADER.size)
        except OSError:
            return 0
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            return 0
        return cast(int, _HEADER.unpack(header)[1])

    def open(self, opening: OpenPool, fingerprint: bytes) -> Catalogue | None:
        """The catalogue of a pool, empty if there is none of the same life. None if it cannot be had.

        `fingerprint`, 32 bytes, names the hash scheme with its secret.
        """
        try:
            self._lock(opening.pool_id)
            return self._open(opening, fingerprint)
        except OSError as error:
            log.warning("no catalogue", pool_id=opening.pool_id, error=str(error))
            return None

    def close(self) -> None:
        """Let another process have the catalogues."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _open(self, opening: OpenPool, fingerprint: bytes) -> Catalogue:
        path = self._path(opening.pool_id)
        record_bytes = _RECORD.size
        size = _HEADER_BYTES + opening.num_blocks * (4 + record_bytes)
        life = (opening.incarnation, opening.num_blocks, opening.block_size, record_bytes, fingerprint)
        if path.exists() and path.stat().st_size == size:
            mapping = _map(path, size)
            magic, _, *found = _HEADER.unpack_from(mapping)
            if magic == _MAGIC and tuple(found) == life:
                catalogue = Catalogue(mapping, opening, is_restored=True)
                catalogue.note_epoch(opening.epoch)
                return catalogue
        # A new file, since a pool of this process may still have the old one mapped.
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_HEADER.pack(_MAGIC, opening.epoch, *life))
            file.truncate(size)
        fresh.replace(path)
        return Catalogue(_map(path, size), opening, is_restored=False)

    def _lock(self, pool_id: str) -> None:
        if pool_id in self._locks:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path(pool_id).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self._locks[pool_id] = lock

    def _path(self, pool_id: str) -> Path:
        return self._folder / f"{quote(pool_id, safe='')}.catalogue"


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)
