"""A headless Chromium, driven over a pipe. It opens a page as a reader does, and reports what the page did.

Nothing is installed for it except Chromium itself. Its DevTools protocol is JSON: one message after another, each ended by a
zero byte. If there is no Chromium, `find_browser` returns None, and tests skip.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
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
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file, or its address with a fragment, in a window of this width."""
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self._browser.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        scheme = "dark" if dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=url)
        self._browser.wait_for("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"].get("exception", {}).get("description", answer))
        return answer["result"].get("value")

    def wait(self, script: str, is_there: str | Callable[[Any], bool]) -> Any:
        """Returns the value of an expression once it contains a text or satisfies a function, within ten seconds."""
        deadline = time.monotonic() + 10
        while True:
            value = self.run(script)
            if (is_there in (value or "")) if isinstance(is_there, str) else is_there(value):
                return value
            assert time.monotonic() < deadline, f"{script} stays {value!r}, and {is_there} was expected"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Presses a key, named as in `KeyboardEvent.key`."""
        code = {" ": "Space"}.get(key, key)
        numbers = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Home": 36, "End": 35, " ": 32}
        common = {"key": key, "code": code, "windowsVirtualKeyCode": numbers.get(key, ord(key[0].upper()))}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": key} if len(key) == 1 else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def move(self, x: float, y: float, *, is_click: bool = False) -> None:
        """Moves the mouse to a point in the window, and optionally clicks."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if is_click:
            for kind in ("mousePressed", "mouseReleased"):
                self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def measure_fonts(self) -> dict[float, str]:
        """Returns the size of all letters in screen pixels, each with a text of that size."""
        return {float(size): text for size, text in self.run(_FONTS).items()}

    def list_complaints(self) -> list[str]:
        """Returns errors and warnings of scripts, and all requests over a network."""
        found = []
        for event in self._browser.events:
            details = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(details["exceptionDetails"].get("exception", {}).get("description", details)))
                case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                    found.append(" ".join(str(item.get("value", item.get("description"))) for item in details["args"]))
                case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                    found.append(details["entry"]["text"])
                case "Network.requestWillBeSent" if not details["request"]["url"].startswith(("file:", "data:")):
                    found.append(f"asks for {details['request']['url']}")
        return found


class Browser:
    """A running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._process = process
        self._writer = os.fdopen(to_browser, "wb")
        self._reader = os.fdopen(from_browser, "rb")
        self._number = 0
        self._rest = b""

    def ask(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._writer.write(json.dumps(message).encode() + b"\0")
        self._writer.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            event = self._read()
            if "method" in event:
                self.events.append(event)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._reader.read1(1 << 16)
            if not more:
                raise AssertionError(f"the browser has ended: {self._process.poll()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def make_tab(self) -> Tab:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{domain}.enable")
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=_RECORD)
        return tab


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Yields a browser that keeps its files in ``folder``."""
    path = find_browser()
    assert path is not None
    pipes = [os.pipe(), os.pipe()]
    ours_out, ours_in = pipes[0][1], pipes[1][0]
    # Numbers other than 3 and 4, which become the browser's own ends.
    theirs_in, theirs_out = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (pipes[0][0], pipes[1][1]))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ]
    flags += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    # The browser reads requests from file 3, and answers on file 4.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", path, *flags],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (pipes[0][0], pipes[1][1], theirs_in, theirs_out):
        os.close(end)
    browser = Browser(process, ours_out, ours_in)
    try:
        yield browser
    finally:
        process.terminate()
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.wait()
