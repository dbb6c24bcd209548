"""The live view, by what a person sees: the pool as it is, at any size, with mouse and with keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Position, expect

from octavo.kvmanager.block_state import BlockState
from support.explanations import EXPLANATION
from support.lively_services import LivelyPool, request_id_of
from support.running_gateway import says
from support.web_page import Served, anew, page_of, served

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pool of 600 blocks in which nothing moves, after some history."""
    pool = LivelyPool(num_blocks=600, num_sequences=12, prompt_blocks=40, shared_blocks=10)
    for _ in range(8):
        pool.tick()
    with served(tmp_path_factory.mktemp("still"), pool, says("hi"), tick_s=3600) as running:
        yield running


@pytest.fixture(scope="module")
def opened(browser: Browser, still: Served) -> Iterator[Page]:
    with page_of(browser, still.url) as opened:
        yield opened


@pytest.fixture
def page(opened: Page, still: Served) -> Page:
    expect(anew(opened, still.url + "#cache").locator(".legend-item.active .num")).not_to_have_text("")
    return opened


COLOUR_AT = """(block) => {
    const canvas = document.getElementById("map-canvas");
    const label = document.getElementById("map").getAttribute("aria-label");
    const columns = Number(/rows of (\\d+)/.exec(label)[1]);
    const pitch = canvas.width / columns;
    const [x, y] = [(block % columns) * pitch + 1, Math.floor(block / columns) * pitch + 1];
    return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3)];
}"""
VARIABLE = """(name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    probe.remove();
    return parts;
}"""


def test_figures_and_legend_are_the_pools_own(page: Page, still: Served) -> None:
    pool = still.services.pool.pool
    counts = pool.counts()
    for state in ("free", "granted", "active", "cached", "quarantined", "transferring"):
        expect(page.locator(f".legend-item.{state} .num")).to_have_text(str(getattr(counts, state)))
    saved = sum(count - 1 for count in pool.blocks.ref_counts if count > 1)
    shared = sum(count > 1 for count in pool.blocks.ref_counts)
    assert shared > 0
    figure = page.locator(".figures > div", has_text="Saved by sharing")
    expect(figure).to_contain_text(str(saved))
    expect(figure).to_contain_text(f"{shared} are shared")
    expect(page.locator(".figures > div", has_text="Running")).to_contain_text("12")
    expect(page.locator("#pool-about")).to_have_text("600 blocks of 16 tokens")


def test_a_block_tells_its_state_references_generation_and_owner_when_pointed_at(page: Page, still: Served) -> None:
    pool = still.services.pool.pool
    block = max(range(600), key=lambda one: pool.blocks.ref_counts[one])
    box = page.locator("#map-canvas").bounding_box()
    layout = re.search(r"in (\d+) rows of (\d+)", page.locator("#map").get_attribute("aria-label") or "")
    assert box is not None and layout is not None
    rows, columns = int(layout[1]), int(layout[2])
    pitch = box["width"] / columns
    assert box["height"] == pytest.approx(rows * pitch)
    place: Position = {"x": (block % columns + 0.5) * pitch, "y": (block // columns + 0.5) * pitch}
    page.locator("#map-canvas").hover(position=place)  # once it has found its place on the page
    readout = page.locator("#readout")
    expect(readout).to_contain_text(f"Block {block} · active · held by {pool.blocks.ref_counts[block]} tables")
    expect(readout).to_contain_text(f"generation {pool.blocks.generations[block]}")
    owner = int((re.search(r"owner: sequence (\d+)", readout.text_content() or "") or [0, 0])[1])
    assert block in pool.tables.table(owner).block_ids
    expect(readout).to_contain_text(request_id_of(owner))


def test_the_map_paints_each_state_in_the_colour_of_its_legend(page: Page, still: Served) -> None:
    blocks = still.services.pool.pool.blocks
    by_state = {state: blocks.states.index(state) for state in (BlockState.GRANTED, BlockState.CACHED)}
    lone = next(one for one in range(600) if blocks.states[one] is BlockState.ACTIVE and blocks.ref_counts[one] == 1)
    shared = max(range(600), key=lambda one: blocks.ref_counts[one])
    assert page.evaluate(COLOUR_AT, by_state[BlockState.GRANTED]) == page.evaluate(VARIABLE, "granted")
    assert page.evaluate(COLOUR_AT, by_state[BlockState.CACHED]) == page.evaluate(VARIABLE, "cached")
    assert page.evaluate(COLOUR_AT, lone) == page.evaluate(VARIABLE, "active")
    deep, plain, sharing = (
        sum(page.evaluate(*arguments))
        for arguments in ((VARIABLE, "active-deep"), (VARIABLE, "active"), (COLOUR_AT, shared))
    )
    assert deep < sharing < plain


def test_the_map_can_be_walked_and_used_by_keyboard(page: Page, still: Served) -> None:
    pool = still.services.pool.pool
    page.locator(".legend-item.transferring").focus()
    page.keyboard.press("Tab")
    readout = page.locator("#readout")
    expect(readout).to_contain_text("Block 0 ·")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("Block 3 ·")
    page.keyboard.press("End")
    expect(readout).to_contain_text("Block 599 ·")
    page.keyboard.press("Home")
    target = next(one for one in range(600) if pool.blocks.ref_counts[one] == 1)
    for _ in range(target):
        page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text(f"Block {target} · active · held by 1 table ·")
    page.keyboard.press("Enter")
    [owner] = [one for one, table in pool.tables if target in table.block_ids]
    expect(page.locator(".detail-title")).to_have_text(request_id_of(owner))


def test_a_sequence_shows_its_block_table(page: Page, still: Served) -> None:
    pool = still.services.pool.pool
    sequence_id = sorted(still.services.pool.lengths)[5]
    page.get_by_placeholder("Find a request").fill(request_id_of(sequence_id))
    expect(page.get_by_role("option")).to_have_count(1)
    page.get_by_role("listbox", name="Sequences").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    table = pool.tables.table(sequence_id).block_ids
    page.get_by_text("Block ids in order").click()
    expect(page.locator(".ids")).to_have_text(" ".join(map(str, table)))
    num_shared = sum(pool.blocks.ref_counts[block] > 1 for block in table)
    expect(page.locator(".chosen")).to_contain_text(f"{len(table)} blocks · {num_shared} shared")
    page.get_by_role("listbox", name="Sequences").focus()
    page.keyboard.press("Escape")
    expect(page.locator(".chosen")).to_be_hidden()
    page.get_by_placeholder("Find a request").fill("no such request")
    expect(page.get_by_text("No sequence of that request is alive.")).to_be_visible()


def test_the_prefix_tree_opens_by_keyboard_and_counts_what_is_findable(page: Page, still: Served) -> None:
    blocks = still.services.pool.pool.blocks
    num_published = sum(key is not None for key in blocks.keys)
    expect(page.locator("#prefixes-about")).to_contain_text(f"{num_published} blocks findable")
    items = page.get_by_role("treeitem")
    expect(items.first).to_contain_text("10 blocks from")
    expect(items.first).to_have_attribute("aria-expanded", "false")
    before = items.count()
    items.first.focus()
    page.keyboard.press("ArrowRight")
    expect(items.first).to_have_attribute("aria-expanded", "true")
    assert items.count() > before
    expect(items.nth(1)).to_have_attribute("aria-level", "2")
    page.keyboard.press("ArrowDown")
    expect(items.nth(1)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(items).to_have_count(before)


def test_why_is_told_in_words(page: Page, still: Served) -> None:
    sequence_id = sorted(still.services.pool.lengths)[0]
    request_id = request_id_of(sequence_id)
    still.services.scheduler.explanations[request_id] = {**EXPLANATION, "id": request_id}
    page.get_by_placeholder("Find a request").fill(request_id)
    page.get_by_role("option").click()
    page.get_by_role("button", name="Why?").click()
    why = page.get_by_role("dialog", name="Why")
    expect(why).to_contain_text("too few blocks were left in the pool")
    expect(why).to_contain_text("1.25 s")
    expect(why).to_contain_text("30 of 40 blocks found in the cache (75 %)")
    expect(why).to_contain_text("seen before, evicted since")
    expect(why).to_contain_text("which cost 12.0 ms")
    page.keyboard.press("Escape")
    expect(why).to_be_hidden()


def test_the_latencies_and_the_goodput_follow_the_limits(page: Page) -> None:
    expect(page.locator("#ttft-now")).to_have_text(re.compile(r"\d+ ms"))
    expect(page.locator("#goodput-now")).to_contain_text("tokens/s")
    page.get_by_label("TPOT under").fill("1")
    page.get_by_label("TPOT under").press("Tab")
    expect(page.locator("#goodput-now")).to_contain_text("0 tokens/s, 0 %")
    expect(page.locator("#steps-readout")).to_contain_text("steps/s; worker busy")


def test_a_chosen_sequence_is_followed_as_it_grows(page: Page, still: Served) -> None:
    sequence_id = sorted(still.services.pool.lengths)[2]
    page.get_by_placeholder("Find a request").fill(request_id_of(sequence_id))
    page.get_by_role("option").click()
    page.get_by_text("Block ids in order").click()
    other = next(
        block
        for one, table in still.services.pool.pool.tables
        for block in table.block_ids
        if one != sequence_id and still.services.pool.pool.blocks.ref_counts[block] == 1
    )
    new = still.call(lambda: still.services.pool.grow(sequence_id))
    table = still.services.pool.pool.tables.table(sequence_id).block_ids
    assert table[-1] == new
    expect(page.locator(".ids")).to_have_text(" ".join(map(str, table)))
    page.wait_for_timeout(100)
    assert page.evaluate(COLOUR_AT, new) == page.evaluate(VARIABLE, "active")
    assert page.evaluate(COLOUR_AT, other) != page.evaluate(VARIABLE, "active")


def test_a_chosen_sequence_that_ends_is_let_go_of(page: Page, still: Served) -> None:
    pool = still.services.pool
    sequence_id = sorted(pool.lengths)[3]
    page.get_by_placeholder("Find a request").fill(request_id_of(sequence_id))
    page.get_by_role("option").click()
    other = next(
        block
        for one, table in pool.pool.tables
        for block in table.block_ids
        if one != sequence_id and pool.pool.blocks.ref_counts[block] == 1
    )
    expect(page.locator(".chosen")).to_be_visible()
    still.call(lambda: pool.end(sequence_id))
    expect(page.get_by_text("The sequence has ended.")).to_be_visible()
    page.wait_for_timeout(100)
    assert page.evaluate(COLOUR_AT, other) == page.evaluate(VARIABLE, "active")
