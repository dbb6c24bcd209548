"""The copying warps of attention on Hopper: keys and values of whole blocks, by the block table, into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from octavo.worker.kernels import decode_rows

TILE = gl.constexpr(decode_rows.TILE)
TILE_ROWS = gl.constexpr(128)
"""Of a program: queries of a tile, each with all heads of its group."""
HEAD_DIM = gl.constexpr(128)
KEYS = gl.constexpr(128)
"""Of a tile."""
STAGES = gl.constexpr(3)
"""Tiles of keys, and as many of values, on their way or in use."""
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""How matrices of 16-bit elements lie in shared memory: in columns of 128 bytes, whose order repeats every 8 lines."""
COLUMNS = gl.constexpr(64)
SLICE = gl.constexpr(8)


@gluon.jit
def take_turn(turn):
    """Index of this program's item. Items get smaller: who has the largest of a turn has the smallest of the next."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def count_turns(num_items):
    whole_turns = num_items // gl.num_programs(0)
    return whole_turns + (take_turn(whole_turns) < num_items).to(gl.int32)


@gluon.jit
def find_item(rows, index, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, IS_PREFIX: gl.constexpr):
    """(KV head, slot, row of the first query, row of its result, first query, queries, positions that the first query
    of all sees, begin and end of the keys).

    Rows of a prefill are tokens. Those of a shared prefix are members, and all see the same.
    """
    tile = index // NUM_KV_HEADS
    if IS_PREFIX:
        _, tiles_ptr, max_members = rows
        tile_ptr = tiles_ptr + tile * TILE
        first, num_members, slot = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
        begin, end, part = gl.load(tile_ptr + 3), gl.load(tile_ptr + 4), gl.load(tile_ptr + 5)
        return index % NUM_KV_HEADS, slot, first, part * max_members + first, 0, num_members, end, begin, end
    else:
        slots_ptr, tokens_ptr, query_lens_ptr, seq_lens_ptr, tile_rows_ptr, tile_parts_ptr = rows
        QUERIES: gl.constexpr = TILE_ROWS // GROUP
        row = gl.load(tile_rows_ptr + tile)
        first_query = gl.load(tile_parts_ptr + tile) * QUERIES
        query_len = gl.load(query_lens_ptr + row)
        context = gl.load(seq_lens_ptr + row) - query_len
        end = context + gl.minimum(first_query + QUERIES, query_len)
        slot, first = gl.load(slots_ptr + row), gl.load(tokens_ptr + row)
        return index % NUM_KV_HEADS, slot, first, first, first_query, query_len, context + 1, 0, end


@gluon.jit
def find_tiles(begin, end):
    """First tile of an item and the one after its last. A row of no query, which pads a step, has one of no key, so
    that all warps do the same."""
    first = begin // KEYS
    return first, gl.maximum(gl.cdiv(end, KEYS), first + 1)


@gluon.jit
def _load_block_ids(table_ptr, tile, end, BLOCK_SIZE: gl.constexpr):
    """Blocks of a tile. -1 where there is no key: its copy lies before the pool and brings zeros."""
    ids = ()
    for block in gl.static_range(KEYS // BLOCK_SIZE):
        index = tile * (KEYS // BLOCK_SIZE) + block
        ids += (gl.load(table_ptr + index, mask=index * BLOCK_SIZE < end, other=-1),)  # type: ignore[assignment]
    return ids


@gluon.jit
def _copy_tile(pool, pieces, stage, is_full, ids, first_line, block_lines):
    """Keys or values of a tile. Pieces lie so that together they are a swizzled matrix [KEYS, HEAD_DIM]."""
    BLOCK_SIZE: gl.constexpr = pieces.shape[1]
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    PARTS: gl.constexpr = HEAD_DIM // COLUMNS
    mbarrier.expect(is_full, KEYS * HEAD_DIM * 2)
    for block in gl.static_range(BLOCKS):
        line = ids[block] * block_lines + first_line
        for part in gl.static_range(PARTS):
            piece = pieces.index((stage * PARTS + part) * BLOCKS + block)
            tma.async_copy_global_to_shared(pool, [line, part * COLUMNS], is_full, piece)


@gluon.jit
def _clear_lines(pieces, stage, num_lines):
    """Zero what follows `num_lines` in the block that they end in: slots that were never written may hold NaN."""
    BLOCK_SIZE: gl.constexpr = pieces.shape[1]
    PARTS: gl.constexpr = HEAD_DIM // COLUMNS
    NUM_SLICES: gl.constexpr = pieces.shape[0] * BLOCK_SIZE // SLICE
    slices = pieces._reinterpret(pieces.dtype, [NUM_SLICES, SLICE, COLUMNS], pieces.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    line = gl.arange(0, SLICE, gl.SliceLayout(1, layout))
    for index in range(num_lines // SLICE, gl.cdiv(num_lines, BLOCK_SIZE) * BLOCK_SIZE // SLICE):
        is_there = (index * SLICE + line < num_lines)[:, None]
        for part in gl.static_range(PARTS):
            piece = slices.index((stage * PARTS + part) * (KEYS // SLICE) + index)
            found = piece.load(layout)
            piece.store(gl.where(is_there, found, gl.zeros_like(found)))


@gluon.jit
def copy_tiles(
    given,
    strides,
    layer_line,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    IS_PREFIX: gl.constexpr,
    CLEARS: gl.constexpr,
):
    """What a copying warp does: one for keys, one for values, which have to be clear of what was never written."""
    pool, tables_ptr, rows, num_items, pieces, full, free = given
    table_stride, block_lines = strides
    BLOCK_SIZE: gl.constexpr = pieces.shape[1]
    copied = 0
    cleared = 0
    for turn in range(count_turns(num_items)):
        item = find_item(rows, take_turn(turn), NUM_KV_HEADS, GROUP, IS_PREFIX)
        kv_head, slot, _, _, _, query_len, num_seen, begin, end = item
        table_ptr = tables_ptr + slot.to(gl.int64) * table_stride
        first_line = layer_line + kv_head * BLOCK_SIZE
        seq_len = num_seen + query_len - 1
        first_tile, end_tile = find_tiles(begin, end)
        ends_in_block = gl.cdiv(end, BLOCK_SIZE) * BLOCK_SIZE > seq_len
        ids = _load_block_ids(table_ptr, first_tile, end, BLOCK_SIZE)
        for tile in range(first_tile, end_tile):
            # Looked up a tile ahead, so that no copy waits for its address.
            next_ids = _load_block_ids(table_ptr, tile + 1, end, BLOCK_SIZE)
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), (copied // STAGES & 1) ^ 1)
            is_full = full.index(stage)
            if CLEARS:
                clears = ends_in_block & (tile == end_tile - 1)
                is_copied = full.index(gl.where(clears, STAGES, stage))
                _copy_tile(pool, pieces, stage, is_copied, ids, first_line, block_lines)
                if clears:
                    mbarrier.wait(is_copied, cleared & 1)
                    _clear_lines(pieces, stage, seq_len - tile * KEYS)
                    fence_async_shared()
                    mbarrier.arrive(is_full)
                    cleared += 1
            else:
                _copy_tile(pool, pieces, stage, is_full, ids, first_line, block_lines)
            ids = next_ids
            copied += 1
