"""The page as such, and its playground."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.common.messages.generation import Submit
from support.lively_services import LivelyPool
from support.running_gateway import TOKENIZER, ids_of, says
from support.scripted_scheduler import Answer
from support.web_page import Served, anew, page_of, served

pytestmark = pytest.mark.timeout(120)

ANSWER = "Every book is cut into folios of equal size."
NUM_TOKENS = len(ids_of(ANSWER)) + 1
"""With the one that ends it."""
SMALL = {"num_blocks": 64, "num_sequences": 2, "prompt_blocks": 12, "shared_blocks": 4}


MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


def script(submit: Submit) -> Answer:
    """An answer by what the prompt asks for."""
    prompt = TOKENIZER.decode(list(submit.prompt_token_ids))
    text = MARKUP if MARKUP in prompt else "ab" * 1500 if "on and on" in prompt else ANSWER
    return Answer([ids_of(text)])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("site"), LivelyPool(**SMALL), script, tick_s=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def opened(browser: Browser, site: Served) -> Iterator[Page]:
    with page_of(browser, site.url) as opened:
        yield opened


@pytest.fixture
def page(opened: Page, site: Served) -> Page:
    return anew(opened, site.url)


def shown(page: Page, view: str) -> Page:
    """The page once all of a view is there."""
    page.get_by_role("link", name={"playground": "Playground", "cache": "Live cache"}[view]).click()
    if view == "cache":
        expect(page.locator("#prefixes-about")).to_contain_text("findable")
    expect(page.locator("#served")).to_have_class("served ready")
    return page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_chat_streams_and_goes_on(page: Page, site: Served) -> None:
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System message").fill("Be brief.")
    ask(page, "What is paging?")
    answers = page.get_by_role("article", name="Answer")
    expect(answers.locator(".answer")).to_have_text(ANSWER)
    expect(answers).to_contain_text(f"{NUM_TOKENS} tokens")
    expect(answers).to_contain_text("first token after")
    submit = site.gateway.scheduler.submits[-1]
    assert (submit.params.temperature, submit.params.num_logprobs) == (0.5, 5)
    before = len(submit.prompt_token_ids)
    ask(page, "And then?")
    expect(answers).to_have_count(2)
    expect(answers.nth(1).locator(".answer")).to_have_text(ANSWER)
    assert len(site.gateway.scheduler.submits[-1].prompt_token_ids) > before + NUM_TOKENS
    page.get_by_role("button", name="New chat").click()
    expect(answers).to_have_count(0)
    expect(page.get_by_text("Ask something.")).to_be_visible()


def test_tokens_show_their_probability_and_what_else_was_likely(page: Page) -> None:
    ask(page, "What is paging?")
    page.get_by_role("button", name="Tokens").click()
    tokens = page.locator(".tokens .token")
    expect(tokens).to_have_count(NUM_TOKENS)
    expect(tokens.nth(1)).to_have_class("token p1")  # e ** -0.5 is 61 %
    card = page.get_by_role("tooltip")
    tokens.nth(1).hover()
    expect(card).to_contain_text("Token 2 of")
    expect(card.locator(".token-row")).to_have_count(5)
    expect(card.locator(".chosen-token")).to_contain_text("60.7 %")
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("Token 3 of")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_a_refused_request_says_why_and_can_be_asked_again(page: Page) -> None:
    page.get_by_label("Longest answer").fill("100000")
    ask(page, "What is paging?")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    page.get_by_label("Longest answer").fill("5")
    ask(page, "What is paging?")
    expect(page.locator(".answer").last).to_have_text(TOKENIZER.decode(ids_of(ANSWER)[:5]))
    expect(page.get_by_role("article").last).to_contain_text("cut at the longest length")
    page.get_by_label("Top p").fill("3")
    ask(page, "Again")
    expect(page.get_by_role("article")).to_have_count(2)


def test_an_answer_can_be_stopped(page: Page, site: Served) -> None:
    ask(page, "Go on and on")
    expect(page.locator(".answer")).to_contain_text("abab")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("article")).to_contain_text("stopped")
    page.wait_for_timeout(100)
    assert site.gateway.scheduler.num_running == 0


def test_markup_in_an_answer_is_text(page: Page) -> None:
    ask(page, MARKUP)
    expect(page.locator(".answer")).to_have_text(MARKUP)
    assert page.locator(".messages img, .messages b").count() == 0


def test_the_theme_follows_the_system_and_the_button(browser: Browser, site: Served) -> None:
    with page_of(browser, site.url, color_scheme="dark") as page:
        theme = page.locator("html")
        expect(theme).to_have_attribute("data-theme", "dark")
        page.emulate_media(color_scheme="light")
        expect(theme).to_have_attribute("data-theme", "light")
        button = page.get_by_role("button", name="Theme")
        button.click()
        button.click()
        expect(theme).to_have_attribute("data-theme", "dark")
        page.reload()
        expect(theme).to_have_attribute("data-theme", "dark")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read(page: Page, theme: Literal["dark", "light"]) -> None:
    """Contrast of 4.5 for text and soft text on both grounds, as WCAG 2.2 AA asks."""
    page.emulate_media(color_scheme=theme)
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    names = ["ink", "soft", "accent", "paper", "sheet"]
    colours = page.evaluate(
        "(names) => names.map((name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`))",
        names,
    )
    light = {name: luminance(colour) for name, colour in zip(names, colours, strict=True)}
    for ink, ground in itertools.product(("ink", "soft", "accent"), ("paper", "sheet")):
        high, low = sorted((light[ink], light[ground]), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def luminance(colour: str) -> float:
    digits = colour.strip().lstrip("#")
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("view", ["playground", "cache"])
def test_narrow_screens_need_no_sideways_scrolling(page: Page, view: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    try:
        assert shown(page, view).evaluate("document.documentElement.scrollWidth") == 390
        expect(page.get_by_role("link", name="Live cache")).to_be_visible()
    finally:
        page.set_viewport_size({"width": 1440, "height": 900})


@pytest.mark.parametrize("view", ["playground", "cache"])
def test_everything_that_takes_focus_has_a_name(page: Page, view: str) -> None:
    nodes = page.context.new_cdp_session(shown(page, view)).send("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in nodes
        if not node["ignored"]
        and any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", []))
    ]
    unnamed = [node["role"]["value"] for node in focusable if not node.get("name", {}).get("value")]
    assert len(focusable) > 10
    assert unnamed == []


def test_little_motion_is_respected(browser: Browser, site: Served) -> None:
    with page_of(browser, site.url + "#cache", reduced_motion="reduce") as page:
        expect(page.locator("#steps-readout")).to_contain_text("steps/s")
        still = page.evaluate(
            """async () => {
                const shot = () => document.getElementById("steps-canvas").toDataURL();
                const frame = () => new Promise(requestAnimationFrame);
                let same = 0;
                for (let at = 0; at < 12; at += 1) {
                    const before = shot();
                    await frame();
                    same += before === shot();
                }
                return same;
            }"""
        )
        assert still >= 8  # it moves with the updates, four times a second, and not with every frame


def test_the_live_view_asks_for_the_admin_key(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keys")
    with (
        served(folder, LivelyPool(**SMALL), says("hi"), tick_s=3600, admin_key="s3cret") as locked,
        page_of(browser, locked.url + "#cache") as page,
    ):
        expect(page.locator("#live-notice")).to_contain_text("needs the admin key")
        page.get_by_role("button", name="Keys").click()
        page.get_by_label("Operator's key, for the live view").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#pool-about")).to_have_text("64 blocks of 16 tokens")
        expect(page.locator("#live-notice")).to_be_hidden()
        assert httpx.get(f"{locked.url}api/stream").status_code == 401


def test_a_server_that_cannot_serve_says_so(page: Page, site: Served) -> None:
    site.call(lambda: site.gateway.scheduler.tell_status(False, "the worker loads its model"))
    try:
        page.reload()
        expect(page.locator("#served")).to_have_text("the worker loads its model")
    finally:
        site.call(lambda: site.gateway.scheduler.tell_status(True))
