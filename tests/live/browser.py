"""A real browser for the tests of pages: windows that notice errors, axe, pictures."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install tacita[dev]")
BROWSER = Path(os.environ.get("TACITA_BROWSER", "/usr/bin/chromium"))
if not BROWSER.exists():
    pytest.skip(f"there is no browser at {BROWSER}; set TACITA_BROWSER", allow_module_level=True)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")
SLOW = 60_000.0  # milliseconds: the machine may be busy
WIDTHS = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}


def launched(held: Any) -> Any:
    return held.chromium.launch(executable_path=str(BROWSER), args=FLAGS)


def opened(browser: Any, width: str, scheme: str = "light") -> Any:
    """A new window that fails the test on any error of the page, the policy's refusals among them."""
    context = browser.new_context(viewport=WIDTHS[width], color_scheme=scheme, accept_downloads=True)
    context.set_default_timeout(SLOW)
    page = context.new_page()
    page.wrong = []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("dialog", lambda dialog: dialog.accept())
    return page


def serious(page: Any) -> list[str]:
    """What axe-core finds; it runs in a world of its own, where the page's policy does not stop it."""
    page.evaluate(AXE + "; null")
    result = page.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))")
    return [str(entry) for entry in result if entry[0] in ("serious", "critical")]


def complaints(page: Any) -> list[str]:
    """What the browser complained of; axe and the camera try styles of their own, which the page's policy stops."""
    return [entry for entry in page.wrong if not entry.startswith("Applying inline style violates")]


def shoot(page: Any, name: str, keep: bool = False) -> None:
    """A picture; with TACITA_SHOTS only those that are kept."""
    folder = Path(os.environ.get("TACITA_SHOTS", Path(tempfile.gettempdir()) / "tacita-shots"))
    if keep or "TACITA_SHOTS" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=not keep)


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"))


def in_sight(page: Any, selector: str) -> bool:
    """Whether something is on the screen, whole and with nothing before it, without scrolling."""
    observations = """given => {
        const one = document.querySelector(given), box = one.getBoundingClientRect();
        const top = document.elementFromPoint(box.left + Math.min(20, box.width / 2), box.top + box.height / 2);
        return box.top >= -1 && box.bottom <= innerHeight + 1 && (top === one || one.contains(top));
    }"""
    return bool(page.evaluate(observations, selector))


def tab_to(page: Any, selector: str, most: int = 150) -> None:
    """Press Tab until something like this has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("given => document.activeElement.matches(given)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def first_view(page: Any) -> float:
    """Seconds from asking for the page that is open to its content on the screen."""
    page.reload()
    ends = time.monotonic() + 60  # wait_for_function would evaluate a string in the page, which its policy forbids
    while not page.evaluate("performance.getEntriesByName('first-contentful-paint').length"):
        assert time.monotonic() < ends
        page.wait_for_timeout(20)
    shown = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    ready = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    return float(page.evaluate(f"Math.max({shown}, {ready})")) / 1000
