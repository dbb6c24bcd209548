"""A gateway with lively services behind it in a thread, and pages of a headless Chromium in front."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from octavo.common.messages.generation import Submit
from support.lively_services import LivelyPool, LivelyServices, lively_groups, lively_services
from support.running_gateway import RunningGateway, running_gateway
from support.scripted_scheduler import Answer


@dataclass
class Served:
    """A gateway that runs in a thread of its own."""

    port: int
    gateway: RunningGateway
    groups: dict[str, LivelyServices]
    """By pool."""
    loop: asyncio.AbstractEventLoop

    @property
    def services(self) -> LivelyServices:
        """Those of the only group."""
        [services] = self.groups.values()
        return services

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/ui/"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run it in the gateway's thread."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(10)


@contextmanager
def served(
    folder: Path,
    pools: LivelyPool | Sequence[LivelyPool],
    script: Callable[[Submit], Answer],
    tick_s: float,
    **settings: Any,
) -> Iterator[Served]:
    """`pools`: of several groups, or the one of the only group. `tick_s`: seconds between two changes of them."""
    started: list[Served] = []
    is_up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        try:
            async with (
                _services(folder, pools, tick_s) as (groups, where),
                running_gateway(script, step_s=0.004, max_model_len=4096, **where, **settings) as gateway,
            ):
                started.append(Served(gateway.port, gateway, groups, asyncio.get_running_loop()))
                is_up.set()
                await stop.wait()
        finally:
            is_up.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    is_up.wait(30)
    try:
        yield started[0]
    finally:
        if started:
            started[0].loop.call_soon_threadsafe(stop.set)
        thread.join(30)


@asynccontextmanager
async def _services(
    folder: Path, pools: LivelyPool | Sequence[LivelyPool], tick_s: float
) -> AsyncIterator[tuple[dict[str, LivelyServices], dict[str, str]]]:
    """By pool, and settings by which a gateway finds them."""
    if isinstance(pools, LivelyPool):
        async with lively_services(folder, pools, tick_s) as services:
            yield {pools.pool_id: services}, services.targets
    else:
        async with lively_groups(folder, pools, tick_s) as (groups, registry):
            yield groups, {"registry": registry}


@contextmanager
def page_of(
    browser: Browser, url: str, refusals: tuple[str, ...] = ("400", "401", "403", "503"), **options: Any
) -> Iterator[Page]:
    """A page in a fresh profile. It must not complain but of `refusals`, nor ask anybody but its own gateway."""
    options = {"viewport": {"width": 1440, "height": 900}, **options}
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    try:
        yield page
        assert [text for text in complaints if not any(f"status of {code}" in text for code in refusals)] == []
        origin = url.split("/ui/")[0]
        assert [address for address in asked if not address.startswith((origin, "data:", "blob:"))] == []
    finally:
        context.close()


def anew(page: Page, url: str) -> Page:
    """The page as somebody sees it who comes for the first time."""
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.goto("about:blank")
    page.mouse.move(0, 0)
    page.goto(url)
    return page
