"""`octavo inspect`: what the block pool of a running server holds."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import asdict

import grpc
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text
from rich.tree import Tree

from octavo.cli.pool_view import STATES, PoolView, PrefixNode, read_pool
from octavo.cli.run_files import running_servers
from octavo.common.links import Address, TlsFiles

_STYLES = dict(zip(STATES, ("grey50", "cyan", "green", "blue", "yellow", "magenta"), strict=True))
_BAR_WIDTH = 64
_MAX_ROWS = 12
_MAX_DEPTH = 6


class NoServerError(Exception):
    """There is nothing to look at. The message says what to do."""


def run_inspect(address: str | None, pool_id: str, tls: TlsFiles | None = None, *, as_json: bool) -> int:
    """Show a pool. Returns the exit status: 0, or 1 if it cannot be read or its ledger does not add up."""
    console = Console()
    try:
        if tls is not None:
            tls.check()
        view = asyncio.run(read_pool(Address.parse(address or _found_address()), pool_id, tls))
    except (NoServerError, ValueError, OSError) as error:
        Console(stderr=True).print(Text(str(error), style="red"))
        return 1
    except grpc.aio.AioRpcError as error:
        Console(stderr=True).print(Text(f"the KV manager cannot be asked: {error.details()}", style="red"))
        return 1
    if as_json:
        print(json.dumps(_as_json(view)))
    else:
        console.print(pool_page(view))
    return 1 if view.violations else 0


def _found_address() -> str:
    servers = running_servers()
    if not servers:
        raise NoServerError(
            "no running `octavo serve` was found (one with --local cannot be looked into). "
            "Give the KV manager's gRPC address: octavo inspect --address grpc://HOST:PORT"
        )
    return servers[0].kvmanager


def _as_json(view: PoolView) -> dict[str, object]:
    return {
        "pool_id": view.pool_id,
        "num_blocks": view.num_blocks,
        "block_size": view.block_size,
        "counts": view.counts,
        "states": [STATES[state] for state in view.states],
        "ref_counts": view.ref_counts,
        "tables": [asdict(table) for table in view.tables],
        "prefixes": [asdict(node) for node in view.prefixes],
        "violations": view.violations,
    }


def pool_page(view: PoolView) -> Group:
    """The whole view."""
    title = Text(f"pool {view.pool_id}: {view.num_blocks} blocks of {view.block_size} tokens", style="bold")
    parts: list[RenderableType] = [title, _bar(view), _legend(view), _sharing(view)]
    if view.tables:
        parts.append(_tables(view))
    if view.prefixes:
        parts.append(_prefix_tree(view.prefixes))
    if view.violations:
        parts.append(Text("\n".join(["the ledger does not add up:", *view.violations]), style="bold red"))
    else:
        parts.append(Text("the ledger adds up", style="green"))
    return Group(*parts)


def _bar(view: PoolView) -> Text:
    """The pool by place: each cell is a stretch of blocks, coloured by the state that most of them have."""
    bar = Text()
    width = min(_BAR_WIDTH, view.num_blocks)
    for cell in range(width):
        part = view.states[cell * view.num_blocks // width : (cell + 1) * view.num_blocks // width]
        bar.append("█", style=_STYLES[STATES[max(set(part), key=part.count)]])
    return bar


def _legend(view: PoolView) -> Text:
    legend = Text()
    for state in STATES:
        if count := view.counts[state]:
            legend.append(f"■ {state} {count} ({count / view.num_blocks:.1%})  ", style=_STYLES[state])
    host = {name: count for name, count in view.counts.items() if name.startswith("host_") and count}
    if host:
        legend.append("  ".join(f"{name.replace('_', ' ')} {count}" for name, count in host.items()))
    return legend


def _sharing(view: PoolView) -> Text:
    shared = view.shared_by()
    saved = sum((holders - 1) * count for holders, count in shared.items())
    if not saved:
        return Text("no block is shared")
    top = ", ".join(f"{count} by {holders}" for holders, count in sorted(shared.items(), reverse=True)[:6])
    return Text(f"shared blocks: {top}; that saves {saved} blocks")


def _tables(view: PoolView) -> Grid:
    grid = Grid(title=f"{len(view.tables)} tables, the longest first", title_justify="left")
    for name in ("sequence", "blocks", "tokens known", "published", "shared", "first blocks"):
        grid.add_column(name, justify="left" if name == "first blocks" else "right")
    for table in sorted(view.tables, key=lambda table: -len(table.block_ids))[:_MAX_ROWS]:
        num_shared = sum(view.ref_counts[block_id] > 1 for block_id in table.block_ids)
        first = " ".join(map(str, table.block_ids[:8])) + (" …" if len(table.block_ids) > 8 else "")
        numbers = (table.sequence_id, len(table.block_ids), table.num_known_tokens, table.num_published_blocks)
        grid.add_row(*map(str, numbers), str(num_shared), first)
    return grid


def _prefix_tree(nodes: list[PrefixNode]) -> Tree:
    """The largest prefixes; a run of blocks without a fork is one line."""
    children: dict[int, list[PrefixNode]] = defaultdict(list)
    for node in nodes:
        children[node.parent_id].append(node)
    sizes = _sizes(nodes)
    tree = Tree(f"{len(nodes)} published blocks in {len(children[-1])} prefixes, the largest first")
    waiting = [(tree, children[-1], 0)]
    while waiting:
        branch, members, depth = waiting.pop(0)
        for node in sorted(members, key=lambda node: -sizes[node.block_id])[:_MAX_ROWS]:
            run, end = 1, node
            while len(children[end.block_id]) == 1:
                end = children[end.block_id][0]
                run += 1
            text = f"{run} blocks from {node.block_id}" if run > 1 else f"block {node.block_id}"
            label = Text(f"{text}, held by {end.ref_count}", style="" if end.ref_count else "dim")
            below = branch.add(label)
            if depth < _MAX_DEPTH and children[end.block_id]:
                waiting.append((below, children[end.block_id], depth + 1))
    return tree


def _sizes(nodes: list[PrefixNode]) -> dict[int, int]:
    """Blocks at and below each node."""
    sizes = {node.block_id: 1 for node in nodes}
    for node in sorted(nodes, key=lambda node: -node.depth):
        if node.parent_id in sizes:
            sizes[node.parent_id] += sizes[node.block_id]
    return sizes
