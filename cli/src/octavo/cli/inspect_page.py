"""What `octavo inspect` prints: pool map, tiers, queues, sequences, prefix tree, ledger."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text
from rich.tree import Tree

from octavo.cli.activity_view import ActivityView
from octavo.cli.pool_view import STATES, PoolView, PrefixNode

_STYLES = dict(zip(STATES, ("grey50", "cyan", "green", "blue", "yellow", "magenta"), strict=True))
_GLYPHS = dict(zip(STATES, "·+▓▒!>", strict=True))
_SHARED_GLYPH, _SHARED_STYLE = "█", "bright_green"
_MAP_LINES = 14
_TIER_WIDTH = 28
_MAX_ROWS = 12
_MAX_DEPTH = 6


def pool_page(view: PoolView, activity: ActivityView | None, width: int) -> Group:
    """The whole view, `width` characters wide. `activity`: None if the scheduler was not asked."""
    title = Text(f"pool {view.pool_id}: {view.num_blocks} blocks of {view.block_size} tokens", style="bold")
    parts: list[RenderableType] = [title, _map(view, width), _legend(view), _sharing(view), _tiers(view)]
    if activity is not None:
        parts += [_queues(activity), _steps(activity)]
    if view.tables or (activity is not None and activity.sequences):
        parts.append(_sequences(view, activity))
    if view.prefixes:
        parts.append(_prefix_tree(view.prefixes))
    if view.violations:
        parts.append(Text("\n".join(["the ledger does not add up:", *view.violations]), style="bold red"))
    else:
        parts.append(Text("the ledger adds up", style="green"))
    return Group(*parts)


def _map(view: PoolView, width: int) -> Text:
    """The pool by place: a cell a block, or where there are too many a stretch of blocks, as most of them are."""
    shown = Text()
    num_cells = min(view.num_blocks, width * _MAP_LINES)
    for cell in range(num_cells):
        first, end = cell * view.num_blocks // num_cells, (cell + 1) * view.num_blocks // num_cells
        states = view.states[first:end]
        state = STATES[max(set(states), key=states.count)]
        is_shared = state == "active" and 2 * sum(count > 1 for count in view.ref_counts[first:end]) > end - first
        glyph, style = (_SHARED_GLYPH, _SHARED_STYLE) if is_shared else (_GLYPHS[state], _STYLES[state])
        shown.append(glyph + ("\n" if (cell + 1) % width == 0 and cell + 1 < num_cells else ""), style=style)
    return shown


def _legend(view: PoolView) -> Text:
    legend = Text()
    for state in STATES:
        if count := view.counts[state]:
            text = f"{_GLYPHS[state]} {state} {count} ({count / view.num_blocks:.1%})  "
            legend.append(text, style=_STYLES[state])
    if view.shared_by():
        legend.append(f"{_SHARED_GLYPH} shared", style=_SHARED_STYLE)
    return legend


def _tiers(view: PoolView) -> Grid:
    """Device and host, by what is in use."""
    grid = Grid(box=None, show_header=False, pad_edge=False)
    counts = view.counts
    tiers = [("device", view.num_blocks, {"active": counts["active"], "cached": counts["cached"]})]
    num_host = sum(counts[name] for name in ("host_free", "host_swapped", "host_cached"))
    if num_host:
        tiers.append(("host", num_host, {"swapped": counts["host_swapped"], "cached": counts["host_cached"]}))
    for name, total, uses in tiers:
        bar = Text()
        for (_, count), style in zip(uses.items(), ("green", "blue"), strict=True):
            bar.append("█" * round(_TIER_WIDTH * count / total), style=style)
        bar.append("░" * (_TIER_WIDTH - len(bar)), style="grey50")
        text = ", ".join(f"{count} {use}" for use, count in uses.items())
        grid.add_row(name, bar, f"{text}, of {total}")
    return grid


def _queues(activity: ActivityView) -> Text:
    queues = activity.queues
    shown = Text(f"running {queues['running']} of {queues['slots']} slots", style="green")
    shown.append(f"   waiting {queues['waiting']}", style="yellow" if queues["waiting"] else "")
    shown.append(f"   waiting for a shared prefix {queues['waiting_for_shared_prefix']}   swapped {queues['swapped']}")
    return shown


def _steps(activity: ActivityView) -> Text:
    steps = activity.steps
    if not steps.num_steps:
        return Text("no step yet")
    stalls = f"{steps.num_stalls} stalls, {steps.stall_s * 1e3:.1f} ms" if steps.num_stalls else "no stalls"
    return Text(
        f"last {steps.num_steps} steps, {steps.span_s:.2f} s: {steps.mean_rows:.1f} rows, worker busy "
        f"{min(1.0, steps.busy_s / max(steps.span_s, 1e-9)):.0%}, without a plan {steps.idle_s * 1e3:.1f} ms, {stalls}"
    )


def _sharing(view: PoolView) -> Text:
    shared = view.shared_by()
    saved = sum((holders - 1) * count for holders, count in shared.items())
    if not saved:
        return Text("no block is shared")
    top = ", ".join(f"{count} by {holders}" for holders, count in sorted(shared.items(), reverse=True)[:6])
    return Text(f"shared blocks: {top}; that saves {saved} blocks")


def _sequences(view: PoolView, activity: ActivityView | None) -> Grid:
    """Those with the longest tables, and those that wait."""
    live = {one.sequence_id: one for one in activity.sequences} if activity is not None else {}
    tables = {table.sequence_id: table for table in view.tables}
    order = sorted({*live, *tables}, key=lambda one: -len(tables[one].block_ids) if one in tables else 0)
    title = f"{len(view.tables)} tables, the longest first"
    if len(order) > _MAX_ROWS:
        title += f"; {len(order) - _MAX_ROWS} sequences more with --json"
    grid = Grid(title=title, title_justify="left")
    grid.add_column("sequence", justify="right")
    if activity is not None:
        grid.add_column("request", overflow="ellipsis", no_wrap=True, max_width=24)
        grid.add_column("state")
    for name in ("tokens", "blocks", "published", "shared"):
        grid.add_column(name, justify="right")
    grid.add_column("first blocks")
    for sequence_id in order[:_MAX_ROWS]:
        table, one = tables.get(sequence_id), live.get(sequence_id)
        cells = [str(sequence_id)]
        if activity is not None:
            state = (one.waits_for.replace("_", " ") or one.state) if one is not None else "kept"
            cells += [one.request_id if one is not None else "", state]
        if one is not None:
            cells.append(f"{one.num_computed_tokens}/{one.num_tokens}")
        else:
            cells.append(str(table.num_known_tokens) if table is not None else "")
        block_ids = table.block_ids if table is not None else []
        num_shared = sum(view.ref_counts[block_id] > 1 for block_id in block_ids)
        first = " ".join(map(str, block_ids[:8])) + (" …" if len(block_ids) > 8 else "")
        num_published = table.num_published_blocks if table is not None else 0
        grid.add_row(*cells, *map(str, (len(block_ids), num_published, num_shared)), first)
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
