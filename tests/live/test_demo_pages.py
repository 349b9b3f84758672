"""As a new user would: `tacita demo --live`, its two links in a browser, one film taken back, its certificate seen."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

from browser import complaints, in_sight, launched, opened, playwright, serious, shoot  # noqa: E402
from live_cluster import eventually  # noqa: E402
from live_site import Running  # noqa: E402

DATA = os.environ.get("TACITA_DATA", "")
LINK = re.compile(r"Page of person 196: (http://127\.0\.0\.1:\d+/enter/\S+)")
ROOM = re.compile(r"Page of the operator: (http://127\.0\.0\.1:\d+) \(password: (\S+)\)")
LONGEST = 420.0  # seconds until the pages are open, on a busy machine


@pytest.mark.skipif(not DATA or not (Path(DATA) / "ml-100k").is_dir(), reason="needs ml-100k in $TACITA_DATA")
def test_from_the_demo_to_a_certificate(tmp_path: Path) -> None:
    demo = Running(tmp_path / "demo.log", "demo", "--live", "--stay", 600, "--out", tmp_path / "demo", "--quiet")
    try:

        def shown() -> bool:
            assert demo.process.poll() is None, demo.text()[-3000:]
            demo.family()
            return LINK.search(demo.text()) is not None and ROOM.search(demo.text()) is not None

        eventually(shown, LONGEST, "both links")
        person, room = LINK.search(demo.text()), ROOM.search(demo.text())
        assert person is not None
        assert room is not None
        with playwright.sync_playwright() as state:
            browser = launched(state)
            _take_back(browser, person[1], (room[1], room[2]))
            browser.close()
        demo.family()
        demo.process.terminate()
        assert demo.process.wait(90) == 0, demo.text()[-3000:]
        assert "All processes are stopped" in demo.text()
        eventually(lambda: demo.family() == [], 180, "nothing of the demo is left")
        assert not (tmp_path / "demo" / "server" / "page.url").exists()
    finally:
        demo.stop()


def _take_back(browser: object, link: str, room: tuple[str, str]) -> None:
    """What anybody would try: the button beside a film; then wait, and look at what the operator sees."""
    own_values, other_values = opened(browser, "wide"), opened(browser, "wide")
    own_values.goto(link)
    own_values.wait_for_url(re.compile(r"http://127\.0\.0\.1:\d+/$"))
    row = own_values.locator("#history li", has=own_values.get_by_role("button", name="Take back")).first
    title = str(row.locator(".title").inner_text())
    row.get_by_role("button", name="Take back").click()
    own_values.get_by_text("waits here for the next message to the server").wait_for()
    assert in_sight(own_values, "#notice p")
    other_values.goto(room[0])  # as it is printed
    other_values.wrong.clear()  # the browser tells of the 401
    other_values.get_by_label("Password").fill(room[1])
    other_values.get_by_role("button", name="Log in").click()
    other_values.locator("#nodes", has_text="library").wait_for()
    own_values.get_by_text("Certificate", exact=True).first.wait_for(timeout=240_000)
    own_values.get_by_role("link", name="Show it").click()  # wherever one has scrolled to
    assert in_sight(own_values, "#requests .verdict")
    assert title in own_values.locator("#requests").inner_text()
    assert own_values.get_by_text("Taken out of the record and the model").count() >= 1
    shoot(own_values, "demo-person")
    other_values.reload()
    other_values.locator("#requests li", has_text="done").first.wait_for()
    assert "most popular" in other_values.locator("#runs").inner_text()
    assert "clock right" in other_values.locator("#nodes").inner_text()
    assert title not in other_values.locator("body").inner_text()
    shoot(other_values, "demo-operator")
    assert serious(own_values) + serious(other_values) == []
    assert complaints(own_values) + complaints(other_values) == []
