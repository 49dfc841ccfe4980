"""A headless Chromium, which opens a page as a reader does, and reports what the page did.

It is the system's Chromium: Playwright installs none. If there is none, `find_browser` returns None, and tests skip.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PHONE_WIDTH: Final = 640
_COMPLAINTS: Final = ("error", "warning", "assert")
# Records the size of every letter that a script draws on a canvas, for which no style gives it.
_RECORD = """
window.drawnFonts = {};
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  if (String(text).trim()) window.drawnFonts[parseFloat(/([0-9.]+)px/.exec(this.font)[1])] = String(text);
  return fill.call(this, text, ...rest);
};
"""
_FONTS = """
(() => {
  const sizes = {...window.drawnFonts};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (["SCRIPT", "STYLE"].includes(parent.tagName) || !parent.getClientRects().length) continue;
    if (!walker.currentNode.data.trim()) continue;
    let scale = 1;
    const svg = parent.closest("svg");
    if (svg) scale = svg.getScreenCTM().a;
    sizes[parseFloat(getComputedStyle(parent).fontSize) * scale] = walker.currentNode.data.trim().slice(0, 40);
  }
  return sizes;
})()
"""


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page at a time, in a window of a computer or of a phone."""

    page: Page

    def __init__(self, browser: Browser) -> None:
        self.complaints: list[str] = []
        """Errors and warnings of scripts, and all requests over a network."""
        self._pages = [browser.new_page(is_mobile=is_mobile) for is_mobile in (False, True)]
        for page in self._pages:
            page.on("pageerror", lambda error: self.complaints.append(str(error)))
            page.on("console", self._hear)
            page.on("request", self._watch)
            page.add_init_script(_RECORD)

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file, or its address with a fragment, in a window of this width."""
        self.complaints.clear()
        self.page = self._pages[width < _PHONE_WIDTH]
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in _COMPLAINTS:
            self.complaints.append(message.text)

    def _watch(self, request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "about:")):
            self.complaints.append(f"asks for {request.url}")

    def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited."""
        return self.page.evaluate(script)

    def wait(self, script: str, is_there: str | Callable[[Any], bool]) -> Any:
        """Returns the value of an expression once it contains a text or satisfies a function, within ten seconds."""
        deadline = time.monotonic() + 10
        while True:
            value = self.run(script)
            if (is_there in (value or "")) if isinstance(is_there, str) else is_there(value):
                return value
            assert time.monotonic() < deadline, f"{script} stays {value!r}, and {is_there} was expected"
            time.sleep(0.02)

    def measure_fonts(self) -> dict[float, str]:
        """Returns the size of all letters in screen pixels, each with a text of that size."""
        return {float(size): text for size, text in self.run(_FONTS).items()}


@contextmanager
def open_tab() -> Iterator[Tab]:
    """Yields a tab of a new browser."""
    from playwright.sync_api import sync_playwright  # the other tests beside these need none

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield Tab(browser)
        browser.close()
