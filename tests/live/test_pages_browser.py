"""Both pages in a real browser, wide and narrow: what a person decides, what an operator watches; axe finds nothing.

TACITA_SHOTS=docs keeps the pictures of the README.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install tacita[dev]")
BROWSER = Path(os.environ.get("TACITA_BROWSER", "/usr/bin/chromium"))
if not BROWSER.exists():
    pytest.skip(f"there is no browser at {BROWSER}; set TACITA_BROWSER", allow_module_level=True)

from pages_site import PASSWORD, PagesSite, pages_site  # noqa: E402

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


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesSite]:
    with pytest.MonkeyPatch.context() as patch:
        made = pages_site(tmp_path_factory.mktemp("pages"), patch)
        yield made
        made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as held:
        made = held.chromium.launch(executable_path=str(BROWSER), args=FLAGS)
        yield made
        made.close()


def opened(browser: Any, width: str, scheme: str = "light") -> Any:
    """A new window that fails the test on any error of the page, the policy's refusals among them."""
    context = browser.new_context(viewport=WIDTHS[width], color_scheme=scheme, accept_downloads=True)
    context.set_default_timeout(SLOW)
    page = context.new_page()
    page.wrong = []  # type: ignore[attr-defined]
    page.on("console", lambda said: page.wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("dialog", lambda dialog: dialog.accept())
    return page


def serious(page: Any) -> list[str]:
    """What axe-core finds; it runs in a world of its own, where the page's policy does not stop it."""
    page.evaluate(AXE + "; null")
    found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))")
    return [str(one) for one in found if one[0] in ("serious", "critical")]


def complaints(page: Any) -> list[str]:
    """What the browser complained of; axe and the camera try styles of their own, which the page's policy stops."""
    return [one for one in page.wrong if not one.startswith("Applying inline style violates")]


def shoot(page: Any, name: str, keep: bool = False) -> None:
    folder = Path(os.environ.get("TACITA_SHOTS", Path(tempfile.gettempdir()) / "tacita-shots"))
    if keep or "TACITA_SHOTS" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=not keep)


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_person_decides_and_an_operator_watches(pages: PagesSite, browser: Any, width: str) -> None:
    node = pages.node
    user = node.store.users()[1][{"wide": 10, "narrow": 11}[width]]
    mine, room = opened(browser, width), opened(browser, width)
    _look(pages, mine, user, width)
    title = _decide(mine)
    pages.others_ask(user)
    mine.get_by_role("button", name=f"Take back {title}", exact=True).click()
    mine.get_by_text("waits here for the next message to the server").wait_for()
    shoot(mine, f"asked-{width}")
    pages.bring()
    _watch(pages, room, width)
    mine.get_by_text("Certificate", exact=True).first.wait_for()
    assert mine.get_by_text("Taken out of the record and the model").count() >= 1
    assert serious(mine) == []
    mine.evaluate("window.scrollTo(0, 0)")
    shoot(mine, f"certificate-{width}")
    if width == "wide":
        shoot(mine, "page-person", keep=True)
    _end(pages, mine, user)
    assert complaints(mine) == []
    assert complaints(room) == []
    for page in (mine, room):
        page.context.close()


def _look(pages: PagesSite, page: Any, user: str, width: str) -> None:
    page.goto(pages.link(user))
    page.wait_for_url(f"{pages.person.url}/")
    page.get_by_text("Why?").first.click()
    page.get_by_text("These are the exact terms").first.wait_for()
    page.get_by_role("button", name="What if not?").first.click()
    page.locator(".preview p").first.wait_for()
    page.locator("#gauge .note, #gauge meter").first.wait_for()
    page.locator("#held li").first.wait_for()
    assert page.locator("#left li").count() >= 1
    assert fits(page)
    assert page.wrong == []
    assert serious(page) == []
    shoot(page, f"person-{width}")


def _decide(page: Any) -> str:
    """Search, switch off and on, nothing and everything; returns a title to take back."""
    row = page.locator("#history li", has_text="was part of a sum").first
    title = str(row.locator(".title").inner_text())
    page.get_by_label("Search").fill(title)
    page.locator("#history .count", has_text="1 item,").wait_for()
    switch = page.get_by_role("switch", name=f"{title} takes part")
    assert switch.is_checked()
    switch.focus()
    page.keyboard.press("Space")
    page.get_by_text("stays here", exact=True).wait_for()
    page.get_by_role("switch", name=f"{title} takes part").click()
    page.get_by_text("takes part", exact=True).wait_for()
    page.locator("#preset-nothing").check()
    page.locator("#notice", has_text="Nothing takes part").wait_for()
    page.locator("#preset-everything").check()
    page.locator("#notice", has_text="Everything takes part").wait_for()
    return title


def _watch(pages: PagesSite, page: Any, width: str) -> None:
    page.goto(pages.operator.url + "/login")
    page.get_by_label("Password").fill("wrong password")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("That is not the password").wait_for()
    page.wrong.clear()  # the browser tells of the 401
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.locator("[data-alert=silent]", has_text="school").wait_for()
    _enrol(page, width)
    page.get_by_role("button", name="Next block of films").click()
    page.get_by_text("opens its next block").wait_for()
    page.get_by_role("button", name="Next block of films").wait_for()
    page.locator("#runs .state", has_text="blocks done").wait_for()
    page.reload()
    page.locator("#requests tbody tr", has_text="done").first.wait_for()
    page.get_by_text("Rounds", exact=True).first.click()
    assert fits(page)
    assert serious(page) == []
    shoot(page, f"operator-{width}")
    if width == "wide":
        shoot(page, "page-operator", keep=True)


def _enrol(page: Any, width: str) -> None:
    from tacita.live.certificates import make_node_key

    key = Path(tempfile.mkdtemp()) / "new.key"
    make_node_key(key)
    page.get_by_text("Enrol a node").click()
    page.locator("#node-name").fill(f"museum-{width}")
    page.get_by_label("Public key").fill(key.with_name("new.key.pub").read_text(encoding="utf-8"))
    page.get_by_role("button", name="Enrol", exact=True).click()
    page.locator("#notice", has_text="SHA256:").wait_for()
    page.locator("#nodes", has_text=f"museum-{width}").wait_for()
    page.get_by_role("button", name=f"Revoke museum-{width}").click()
    page.locator("#notice", has_text="is revoked").wait_for()


def _end(pages: PagesSite, page: Any, user: str) -> None:
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Export", exact=True).click()
    assert user in Path(waiting.value.path()).read_text(encoding="utf-8")
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Go on").wait_for()
    page.get_by_text("Erase everything of mine").click()
    page.get_by_label("Type your id").fill(user)
    page.get_by_role("button", name="Erase", exact=True).click()
    page.get_by_text("are gone from this device").wait_for()
    assert user not in pages.node.store.users()[1]


def test_dark_pages_have_contrast_too(pages: PagesSite, browser: Any) -> None:
    user = pages.node.store.users()[1][12]
    page = opened(browser, "wide", "dark")
    page.goto(pages.link(user))
    page.wait_for_url(f"{pages.person.url}/")
    page.locator("#held li").first.wait_for()
    assert serious(page) == []
    shoot(page, "person-dark")
    page.context.close()


def test_a_site_elsewhere_reaches_nothing(pages: PagesSite, browser: Any) -> None:
    """A page of another port of this machine, in the same browser with the same cookies."""
    user = pages.node.store.users()[1][13]
    page = opened(browser, "wide")
    page.goto(pages.link(user))
    page.wait_for_url(f"{pages.person.url}/")
    page.goto(f"{pages.operator.url}/login")
    tried = page.evaluate(
        "url => fetch(url + '/v1/me', {credentials: 'include'}).then(r => r.status, e => 'refused')", pages.person.url
    )
    assert tried == "refused"
    changed = page.evaluate(
        "url => fetch(url + '/do/pause', {method: 'POST', mode: 'no-cors', credentials: 'include', "
        "headers: {'content-type': 'application/x-www-form-urlencoded'}, body: 'paused=yes'})"
        ".then(r => r.type, e => 'refused')",
        pages.person.url,
    )
    assert changed in ("opaque", "refused")
    from tacita.live.node import persons

    assert not persons.standing(pages.node.store, user)["paused"]
    page.context.close()
