"""Real pages in a real browser. Pages and pictures of them are left in ``build/browser`` for people to look at."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).parents[2] / "build" / "browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser tests are skipped and say so, unless ``MEGAMIND_REQUIRE_BROWSER`` is set: then they fail."""
    if os.environ.get("MEGAMIND_REQUIRE_BROWSER"):
        return
    missing = None
    if importlib.util.find_spec("playwright") is None:
        missing = "playwright is not installed (extra dev)"
    elif _executable() is None:
        missing = f"none of {', '.join(BROWSERS)} on PATH (Debian: apt-get install chromium)"
    for item in items:
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=missing))


def _executable() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Not for the whole session: while playwright is started its event loop runs in this thread, and no test could run
    # another one.
    from playwright.sync_api import sync_playwright

    executable = _executable()
    assert executable is not None, f"none of {', '.join(BROWSERS)} on PATH"
    with sync_playwright() as playwright:
        # Shared memory of a container is often too small for a browser.
        running = playwright.chromium.launch(executable_path=executable, args=["--disable-dev-shm-usage"])
        yield running
        running.close()


class OpenPage:
    """A page in a window of its own, and what went wrong in it.

    Attributes:
        page: Playwright's page.
        troubles: Errors and warnings of the console, exceptions, requests for anything but the file itself.
    """

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.troubles: list[str] = []
        self._path = path
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: self._note(request.url != path.as_uri(), request.url))
        page.goto(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is painted."""
        if self.page.evaluate("() => !document.documentElement.classList.contains('plain')"):
            self.page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def colour_at(self, x: float, y: float) -> tuple[int, ...]:
        """Red, green and blue of the plot at a point of the window."""
        picked = self.page.evaluate(
            """([x, y]) => {
              const plot = document.getElementById("plot");
              const box = plot.getBoundingClientRect();
              const copy = new OffscreenCanvas(1, 1).getContext("2d");
              const ratio = plot.width / box.width;
              copy.drawImage(plot, -Math.round((x - box.left) * ratio), -Math.round((y - box.top) * ratio));
              return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            [x, y],
        )
        return tuple(picked)

    def picture(self, name: str) -> None:
        """Leaves a picture of the whole page; the window is resized for it, which may close a tooltip."""
        self.settle()
        self.page.screenshot(path=str(self._path.with_name(f"{name}.png")), full_page=True)

    def _note(self, wrong: bool, text: str) -> None:
        if wrong:
            self.troubles.append(text)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., OpenPage]]:
    """Writes a page and opens it: ``open_page(name, html, **options of the window)``."""
    BUILD.mkdir(parents=True, exist_ok=True)
    contexts = []

    def opened(name: str, html: str, **options: Any) -> OpenPage:
        path = BUILD / f"{name}.html"
        path.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **options))
        return OpenPage(contexts[-1].new_page(), path)

    yield opened
    for context in contexts:
        context.close()
