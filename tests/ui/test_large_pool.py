"""The live view at 100 thousand blocks and 500 sequences that change ten times a second."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support.lively_services import LivelyPool
from support.running_gateway import says
from support.web_page import Served, page_of, served

FRAME_MS = 16.7


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Served]:
    pool = LivelyPool(num_blocks=100_000, num_sequences=500, prompt_blocks=150, shared_blocks=60)
    with served(tmp_path, pool, says("hi"), tick_s=0.1) as running:
        yield running


@pytest.mark.timeout(120)
def test_frames_stay_short(browser: Browser, large: Served) -> None:
    """What a frame costs the page's thread, of all that it draws. How often frames come depends on who else runs."""
    with page_of(browser, large.url + "#cache") as page:
        expect(page.locator("#pool-about")).to_have_text("100,000 blocks of 16 tokens")
        expect(page.locator(".figures > div", has_text="Running")).to_contain_text("500")
        page.locator("#sequence-list .row").nth(3).click()
        page.wait_for_timeout(500)
        page.evaluate("performance.clearMeasures('octavo-frame')")
        before = page.locator(".legend-item.cached .num").text_content()
        page.wait_for_timeout(2500)
        frames = page.evaluate("performance.getEntriesByName('octavo-frame').map((one) => one.duration)")
        assert page.locator(".legend-item.cached .num").text_content() != before
        assert page.locator("#sequence-list .row").count() < 40
    assert len(frames) >= 20
    assert statistics.median(frames) < FRAME_MS / 2
    print(f"frame: median {statistics.median(frames):.2f} ms, p95 {sorted(frames)[int(0.95 * len(frames))]:.2f} ms")
