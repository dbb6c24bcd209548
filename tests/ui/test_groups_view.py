"""Several worker groups in the live view: all side by side, and one that is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.common.messages.generation import SchedulerLoad
from support.lively_services import LivelyPool, request_id_of
from support.running_gateway import says
from support.web_page import Served, anew, page_of, served

pytestmark = pytest.mark.timeout(120)

LOADS = {
    "left": SchedulerLoad(num_running=4, max_num_running=8, num_blocks=150, num_available_blocks=15),
    "right": SchedulerLoad(7, 2100, num_running=8, max_num_running=8, num_blocks=300, num_available_blocks=225),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Pools in which nothing moves, of 150 blocks and 4 sequences, and of 300 and 8."""
    pools = [
        LivelyPool(load.num_blocks, load.num_running, 20, 6, seed=load.num_running, pool_id=name)
        for name, load in LOADS.items()
    ]
    with served(tmp_path_factory.mktemp("groups"), pools, says("hi"), tick_s=3600) as running:
        for name, scheduler in running.gateway.schedulers.items():
            running.call(partial(scheduler.tell, LOADS[name]))
        yield running


@pytest.fixture(scope="module")
def opened(browser: Browser, site: Served) -> Iterator[Page]:
    with page_of(browser, site.url) as opened:
        yield opened


@pytest.fixture
def page(opened: Page, site: Served) -> Page:
    expect(anew(opened, site.url + "#cache").locator("#pool-about")).to_have_text("left · 150 blocks of 16 tokens")
    return opened


def test_groups_stand_side_by_side_with_load_and_hit_rate(page: Page, site: Served) -> None:
    rows = page.get_by_role("radiogroup", name="Worker groups").locator(".group")
    expect(rows).to_have_count(2)
    expect(page.locator("#groups-about")).to_have_text("12 running and 7 waiting in 2 groups")
    expect(rows.nth(0)).to_contain_text("4 of 8")
    expect(rows.nth(0)).to_contain_text("90 % of 150")
    expect(rows.nth(1)).to_contain_text("7, 2,100 tokens")
    expect(rows.nth(1)).to_contain_text("25 % of 300")
    for row, pool in zip((rows.nth(0), rows.nth(1)), LOADS, strict=True):
        stats = site.groups[pool].pool.pool.stats
        share = 100 * stats.num_prefix_hit_tokens / stats.num_prefix_lookup_tokens
        expect(row.locator(".hits .num")).to_have_text(f"{share:.0f} %")


def test_another_group_is_chosen_by_keyboard_and_stays_chosen(page: Page, site: Served) -> None:
    left, right = (sorted(site.groups[pool].pool.lengths) for pool in LOADS)
    sequences = page.locator("#sequence-list")
    expect(sequences).to_contain_text(request_id_of(left[0])[-8:])
    page.get_by_role("radio", name="left").focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="right")).to_be_checked()
    expect(page.locator("#pool-about")).to_have_text("right · 300 blocks of 16 tokens")
    expect(page.locator(".legend-item.active .num")).to_have_text(str(site.groups["right"].pool.pool.counts().active))
    expect(sequences).to_contain_text(request_id_of(right[-1])[-8:])
    expect(page).to_have_url(f"{site.url}#cache/right")
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("link", name="Live cache").click()
    expect(page.locator("#pool-about")).to_contain_text("right")
    page.goto(f"{site.url}#cache/right")
    page.reload()
    expect(page.locator("#pool-about")).to_contain_text("right")


def test_a_group_that_is_not_there_gives_way_to_the_first(browser: Browser, site: Served) -> None:
    with page_of(browser, f"{site.url}#cache/gone", refusals=("404",)) as page:
        expect(page.locator("#pool-about")).to_have_text("left · 150 blocks of 16 tokens")
        expect(page.get_by_role("radio", name="left")).to_be_checked()
        expect(page).to_have_url(f"{site.url}#cache/")


def test_a_group_in_trouble_says_why(page: Page, site: Served) -> None:
    right = site.gateway.schedulers["right"]
    site.call(lambda: right.tell_status(False, "the worker starts over"))
    try:
        row = page.locator(".group", has_text="right")
        expect(row).to_contain_text("the worker starts over")
        expect(page.locator(".group", has_text="left")).to_contain_text("ready")
    finally:
        site.call(lambda: right.tell_status(True))


def test_groups_fit_on_a_narrow_screen(browser: Browser, site: Served) -> None:
    with page_of(browser, f"{site.url}#cache/right", viewport={"width": 390, "height": 800}, has_touch=True) as page:
        expect(page.locator("#pool-about")).to_contain_text("right")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator(".group", has_text="left").tap()
        expect(page.locator("#pool-about")).to_contain_text("left")
