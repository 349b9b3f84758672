"""Both pages in a real browser, wide and narrow: what a person decides, what an operator watches; axe finds nothing.

TACITA_SHOTS=docs keeps the pictures of the README.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live

from browser import (  # noqa: E402
    WIDTHS,
    complaints,
    first_view,
    fits,
    in_sight,
    launched,
    opened,
    playwright,
    serious,
    shoot,
    tab_to,
)
from pages_site import PASSWORD, PagesSite, pages_site  # noqa: E402


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesSite]:
    with pytest.MonkeyPatch.context() as patch:
        result = pages_site(tmp_path_factory.mktemp("pages"), patch)
        yield result
        result.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as state:
        result = launched(state)
        yield result
        result.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_person_decides_and_an_operator_watches(pages: PagesSite, browser: Any, width: str) -> None:
    node = pages.node
    user = node.store.list_users()[1][{"wide": 10, "narrow": 11}[width]]
    own_values, room = opened(browser, width), opened(browser, width)
    _look(pages, own_values, user, width)
    title = _decide(own_values)
    pages.others_ask(user)
    own_values.get_by_role("button", name=f"Take back {title}", exact=True).click()
    own_values.get_by_text("waits here for the next message to the server").wait_for()
    assert in_sight(own_values, "#notice p")  # wherever one has scrolled to
    own_values.get_by_role("link", name="Show it").click()
    assert in_sight(own_values, "#requests h3")
    shoot(own_values, f"asked-{width}")
    pages.bring()
    _watch(pages, room, width)
    own_values.get_by_text("Certificate", exact=True).first.wait_for()
    assert own_values.get_by_text("Taken out of the record and the model").count() >= 1
    own_values.locator("#history li", has_text="taken back").first.wait_for()
    own_values.locator("#held li", has_text="It has certified since").wait_for()
    assert serious(own_values) == []
    own_values.evaluate("window.scrollTo(0, 0)")
    shoot(own_values, f"certificate-{width}")
    assert in_sight(own_values, "#requests .verdict")
    if width == "wide":
        shoot(own_values, "page-person", keep=True)
    _end(pages, own_values, user)
    assert complaints(own_values) == []
    assert complaints(room) == []
    for page in (own_values, room):
        page.context.close()


def _look(pages: PagesSite, page: Any, user: str, width: str) -> None:
    page.goto(pages.link(user))
    page.wait_for_url(f"{pages.person.url}/")
    page.get_by_text("Why?").first.click()
    page.get_by_text("These are the exact terms").first.wait_for()
    page.get_by_role("button", name="What if not?").first.click()
    page.locator(".preview p").first.wait_for()
    page.locator("#gauge meter").wait_for()
    assert page.locator("#gauge", has_text="No budget is counted here").count() == 1  # of the other run
    page.locator("#costs-1 li", has_text="cost you").first.wait_for()
    page.get_by_label("Most that a run may spend of you").fill("1.5")
    page.get_by_role("button", name="Allow that much").click()
    page.locator("#notice", has_text="at most 1.5 of your budget").wait_for()
    assert in_sight(page, "#notice p")
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
    page.locator("#requests li", has_text="done").first.wait_for()
    page.get_by_text("Rounds", exact=True).first.click()
    page.locator("#runs article", has_text="careful").get_by_text("Budgets", exact=True).click()
    budgets = page.locator("#runs article", has_text="careful").locator(".spread tbody tr", has_text="sum")
    budgets.first.wait_for()  # nodes do not say who spent how much
    assert page.locator("#runs .quality tr", has_text="each node alone").count() >= 2
    assert fits(page)
    assert serious(page) == []
    shoot(page, f"operator-{width}")
    page.evaluate("window.scrollTo(0, 0)")
    if width == "wide":
        shoot(page, "page-operator", keep=True)


def _enrol(page: Any, width: str) -> None:
    from tacita.live.tls_certificates import make_node_key

    key = Path(tempfile.mkdtemp()) / "new.key"
    make_node_key(key)
    page.get_by_text("Budgets", exact=True).first.click()
    with page.expect_response(lambda entry: "/part/runs" in entry.url):  # it is looked at anew every ten seconds
        pass
    page.wait_for_timeout(300)
    assert page.locator("#runs details[open]").count() == 1  # and nothing folds itself
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
    assert user not in pages.node.store.list_users()[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_dark_pages_have_contrast_too(pages: PagesSite, browser: Any, width: str) -> None:
    user = pages.node.store.list_users()[1][12]
    own_values, room = opened(browser, width, "dark"), opened(browser, width, "dark")
    own_values.goto(pages.link(user))
    own_values.wait_for_url(f"{pages.person.url}/")
    own_values.locator("#held li").first.wait_for()
    own_values.locator("#declare").wait_for()
    room.goto(f"{pages.operator.url}/login")
    shoot(room, f"login-dark-{width}")
    assert serious(room) == []
    room.get_by_label("Password").fill(PASSWORD)
    room.get_by_role("button", name="Log in").click()
    room.get_by_text("Budgets", exact=True).first.click()
    for page, name in ((own_values, "person"), (room, "operator")):
        assert fits(page)
        assert serious(page) == []
        shoot(page, f"{name}-dark-{width}")
        page.context.close()


def test_the_keyboard_is_enough(pages: PagesSite, browser: Any) -> None:
    """From the top of the page to a request and a pause, with Tab, Enter, Space and arrows."""
    page, user = opened(browser, "wide"), pages.node.store.list_users()[1][15]
    page.goto(pages.link(user))
    page.wait_for_url(f"{pages.person.url}/")
    tab_to(page, ".skip")
    assert in_sight(page, ".skip")
    tab_to(page, ".recommended summary")
    page.keyboard.press("Enter")
    page.get_by_text("These are the exact terms").first.wait_for()
    tab_to(page, ".terms button")
    page.keyboard.press("Enter")
    page.locator(".preview p").first.wait_for()
    tab_to(page, "#preset-everything")
    page.keyboard.press("ArrowUp")
    page.locator("#notice", has_text="What takes part today goes on").wait_for()
    assert page.evaluate("document.activeElement.id") == "preset-some"
    tab_to(page, "#history [role=switch]")
    page.keyboard.press("Space")
    page.get_by_text("stays here", exact=True).first.wait_for()
    tab_to(page, "#history .acts button")
    page.keyboard.press("Enter")
    page.get_by_text("waits here for the next message to the server").wait_for()
    tab_to(page, "#pause")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Go on").wait_for()
    assert complaints(page) == []
    page.context.close()


def test_an_owner_hands_out_links(pages: PagesSite, browser: Any) -> None:
    page = opened(browser, "narrow")
    page.goto(pages.owners_link())
    page.wait_for_url(f"{pages.person.url}/")
    page.get_by_role("button", name="Make a link").first.click()
    page.locator("#notice", has_text="within ten minutes").wait_for()
    assert fits(page)
    assert serious(page) == []
    shoot(page, "owner-narrow")
    page.context.close()


def test_the_first_view_is_quick_with_much_to_show(pages: PagesSite, browser: Any) -> None:
    """100,000 rows of history and 1,000 nodes: under a second where nothing else runs.

    Where the machine is busy a page with next to nothing on it is slow too, and so much more is allowed.
    """
    user = pages.crowd()
    own_values, room = opened(browser, "wide"), opened(browser, "wide")
    own_values.goto(pages.link(user))
    own_values.wait_for_url(f"{pages.person.url}/")
    assert "100,0" in own_values.locator("#tiles").inner_text()
    room.goto(f"{pages.operator.url}/login")
    least = min(first_view(room) for _ in range(3))
    room.get_by_label("Password").fill(PASSWORD)
    room.get_by_role("button", name="Log in").click()
    room.locator("#nodes .count", has_text="1,00").wait_for()
    took = {
        name: min(first_view(page) for _ in range(3)) for name, page in (("person", own_values), ("operator", room))
    }
    print(f"first view: {took}, of a page with next to nothing on it: {least}")
    assert all(entry < max(3.0, 10 * least) for entry in took.values()), (took, least)


def test_a_site_elsewhere_reaches_nothing(pages: PagesSite, browser: Any) -> None:
    """A page of another port of this machine, in the same browser with the same cookies."""
    user = pages.node.store.list_users()[1][13]
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
    from tacita.live.node import user_queries

    assert not user_queries.summarise_user(pages.node.store, user)["paused"]
    page.context.close()
