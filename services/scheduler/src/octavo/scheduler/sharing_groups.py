"""Owns the grouping of the open slots by the leading blocks that their tables share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from octavo.common.messages.step import SharingGroup


@dataclass(eq=False, slots=True)
class _Node:
    """A leaf is one slot; a branch is the place where the tables below it part. Root: a branch at 0 blocks."""

    table: list[int]
    """Of a leaf: its own. Of a branch: that of a slot which was below it when it was made; the first `num_blocks`
    entries of an append-only table never change."""
    num_blocks: int = 0
    """Of a branch: leading blocks that all slots below it share."""
    slot: int | None = None
    """None for a branch."""
    parent: _Node | None = None
    key: int = 0
    """Its place among the parent's children: the first block after the parent's, or -1 - slot if there was none."""
    children: dict[int, _Node] = field(default_factory=dict)
    num_slots: int = 1
    saved_below: int = 0
    """Reads that the best grouping inside the children saves."""
    saved: int = 0
    """Reads that the best grouping of the slots below saves in one step."""
    group: SharingGroup | None = None
    """Of a branch: all slots below it, if they were one group since the last change."""


class SharingGroups:
    """Which rows of a step can read a run of blocks once for all of them.

    The tables of all open slots are kept as a radix tree, changed when a slot opens or closes and at no other time:
    sequences append private blocks only. A group of k rows that share b blocks saves (k - 1) * b block reads a step.
    Groups are disjoint and not nested: at each branch of the tree, either all rows below it form one group over the
    blocks that all of them share, or the groups of its children stand; whichever saves more, the larger group on a
    tie. A group has at least two rows and `min_blocks` blocks.
    """

    def __init__(self, min_blocks: int) -> None:
        self._min_blocks = min_blocks
        self._root = _Node([], num_slots=0)
        self._leaves: dict[int, _Node] = {}
        self._groups: list[SharingGroup] | None = []
        """None: to be collected from the tree."""

    def open(self, slot: int, table: list[int]) -> None:
        """`table` is the live table of the slot's sequence: it may grow at its end until the slot is closed."""
        leaf = _Node(table, slot=slot)
        self._leaves[slot] = leaf
        node = self._root
        while True:
            child = node.children.get(table[node.num_blocks]) if node.num_blocks < len(table) else None
            if child is None:
                _attach(leaf, node)
                break
            limit = len(child.table) if child.slot is not None else child.num_blocks
            num_shared = _num_shared(child.table, table, node.num_blocks + 1, min(limit, len(table)))
            if child.slot is None and num_shared == child.num_blocks:
                node = child
                continue
            branch = _Node(child.table, num_shared, num_slots=child.num_slots, saved_below=child.saved)
            branch.parent, branch.key = node, child.key
            node.children[child.key] = branch
            branch.saved = child.saved
            _attach(child, branch)
            _attach(leaf, branch)
            break
        self._count(leaf.parent, 1)

    def close(self, slot: int) -> None:
        """Slots that never shared in a plan are unknown here, and ignored."""
        leaf = self._leaves.pop(slot, None)
        if leaf is None:
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        self._count(parent, -1)
        if parent.parent is not None and len(parent.children) == 1:
            self._splice_out(parent)

    def of_rows(self, slots: list[int]) -> list[SharingGroup]:
        """The groups among the rows of a plan, given by their slots."""
        if self._groups is None:
            self._groups = list(self._collect(self._root))
        if not self._groups or len(slots) == len(self._leaves):
            return self._groups
        absent = self._leaves.keys() - set(slots)
        present = [group if absent.isdisjoint(group.slots) else _without(absent, group) for group in self._groups]
        return [group for group in present if len(group.slots) > 1]

    def _splice_out(self, branch: _Node) -> None:
        """Put the only child of a branch in its place."""
        [child] = branch.children.values()
        parent = branch.parent
        assert parent is not None
        child.parent, child.key = parent, branch.key
        parent.children[branch.key] = child
        self._change_saved(parent, child.saved - branch.saved)

    def _count(self, node: _Node | None, change: int) -> None:
        """A slot has come or gone below `node`."""
        self._groups = None
        saved_change = 0
        while node is not None:
            node.group = None
            node.num_slots += change
            node.saved_below += saved_change
            saved_change = self._weigh(node)
            node = node.parent

    def _change_saved(self, node: _Node | None, change: int) -> None:
        while node is not None and change:
            node.saved_below += change
            change = self._weigh(node)
            node = node.parent

    def _weigh(self, node: _Node) -> int:
        """Decide anew between one group and those of the children. Returns by how much `saved` changes."""
        before = node.saved
        node.saved = max(self._saved_as_one(node), node.saved_below)
        return node.saved - before

    def _saved_as_one(self, node: _Node) -> int:
        return (node.num_slots - 1) * node.num_blocks if node.num_blocks >= self._min_blocks else 0

    def _collect(self, root: _Node) -> Iterator[SharingGroup]:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if not node.saved:
                continue
            if self._saved_as_one(node) >= node.saved_below:
                if node.group is None:
                    node.group = SharingGroup(tuple(_slots_below(node)), node.num_blocks)
                yield node.group
            else:
                waiting += node.children.values()


def _attach(node: _Node, parent: _Node) -> None:
    """Make it a child. A table that ends where the parent does has no next block to be found by."""
    place = parent.num_blocks
    node.key = node.table[place] if place < len(node.table) else -1 - (node.slot or 0)
    node.parent = parent
    parent.children[node.key] = node


def _num_shared(one: list[int], other: list[int], low: int, high: int) -> int:
    """Leading entries that two tables share: at least `low`, at most `high`.

    Blocks found by hash are equal up to a place and different after it, so that bisection finds it. Where two
    sequences computed the same block side by side that need not hold, and the entries are compared one by one.
    """
    first = low
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    if one[first:low] == other[first:low]:
        return low
    return next(place for place in range(first, low) if one[place] != other[place])


def _without(absent: Set[int], group: SharingGroup) -> SharingGroup:
    return SharingGroup(tuple([slot for slot in group.slots if slot not in absent]), group.num_blocks)


def _slots_below(node: _Node) -> Iterable[int]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.slot is not None:
            yield node.slot
        else:
            waiting += node.children.values()
