"""Checks a report in a browser: no errors, no network requests, nothing wider than the screen.

    python tests/bench/page.py REPORT.html OUT_DIR

Opens the page in headless Chromium (Debian's package `chromium`) at the widths of phones and of a desktop, in light and
dark mode, and writes a screenshot of each, and the page as it is printed. Exits with 1 on any message in the console,
any request but that for the page, and any width that the page overflows. Chromium is controlled through a pipe, without
a library.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCREENS = [(width, theme, "screen") for width in (360, 390, 1280) for theme in ("light", "dark")]
PAPER = (700, "dark", "print")
"""A4 between its margins, printed from a dark screen."""
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Browser:
    """Chromium with one page, and the events of that page. Messages are JSON, each ended by a zero byte."""

    def __init__(self, profile: str):
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise SystemExit("there is no chromium; on Debian, apt-get install chromium")
        # Chromium reads from descriptor 3 and writes to 4; our own descriptors must not have these numbers.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pair in (os.pipe(), os.pipe()) for end in pair]
        commands, self._to, self._from, events = ends

        def lend() -> None:
            os.dup2(commands, 3)
            os.dup2(events, 4)

        # Chromium refuses to run its sandbox as root.
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self.process = subprocess.Popen(
            [program, *flags], preexec_fn=lend, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (commands, events):
            os.close(end)
        self._numbers, self._buffer, self.session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == number:
                if "error" in reply:
                    raise SystemExit(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self.events.append(reply)

    def wait_for(self, event: str) -> None:
        while not any(message.get("method") == event for message in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            if not data:
                raise SystemExit("chromium has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


def look(browser: Browser, page: Path, width: int, theme: str, media: str, out: Path) -> list[str]:
    """Returns the problems of the page at this width."""
    browser.events.clear()
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    scheme = [{"name": "prefers-color-scheme", "value": theme}]
    browser.ask("Emulation.setEmulatedMedia", media=media, features=scheme)
    browser.ask("Page.navigate", url=page.as_uri())
    browser.wait_for("Page.loadEventFired")

    def value(expression: str) -> Any:
        return browser.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)["result"][
            "value"
        ]

    value("Promise.all([...document.images].map(image => image.decode())).then(() => true)")
    shown = value("document.documentElement.scrollWidth")
    unseen = value("[...document.images].filter(image => !image.naturalWidth).length")
    size = browser.ask("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
    picture = browser.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
    (out / f"{width}-{theme if media == 'screen' else media}.png").write_bytes(base64.b64decode(picture))
    problems = [f"is {shown} pixels wide on a screen of {width}"] if shown > width else []
    problems += [f"{unseen} pictures are not shown"] if unseen else []
    for message in browser.events:
        params = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:") and url != page.as_uri():
                problems.append(f"asks for {url}")
        elif message["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            problems.append(f"says in the console: {json.dumps(params)[:400]}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    page, out = options.page.resolve(strict=True), options.out
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
            browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                browser.ask(f"{domain}.enable")
            for width, theme, media in (*SCREENS, PAPER):
                problems = look(browser, page, width, theme, media, out)
                failed |= bool(problems)
                print(f"{width} pixels, {theme}, {media}: {'; '.join(problems) or 'fine'}")
            printed = browser.ask("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)["data"]
            (out / "printed.pdf").write_bytes(base64.b64decode(printed))
        finally:
            browser.process.kill()
            browser.process.wait()
    sys.exit(failed)


if __name__ == "__main__":
    main()
