"""Our HTML pages in a real browser: Chromium, headless, wide and narrow, light and dark.

With the environment variable SCREENSHOTS, pictures of the pages are written to that folder.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

from benchmark.job import Options
from benchmark.report import write_report
from fs_lowrank.draw.report import write_page
from fs_lowrank.runs.shown import read_runs

ROOT = Path(__file__).parents[2]
#: without these, a browser in a closed network tries to reach its maker
QUIET = "--disable-background-networking --disable-component-update --disable-sync --disable-quic --no-first-run"

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in f"--headless --no-sandbox --disable-gpu {QUIET} --user-data-dir={profile}".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as made:
        yield made


@pytest.fixture
def show(browser):
    """Opens a page at a width and a colour scheme, and checks what is asked of every page."""

    def opened(path, width, scheme, within="body"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get_log("browser")
        browser.get(path.as_uri())
        browser.execute_script("localStorage.clear()")  # in which the site keeps the scheme of its last visit
        browser.get(path.as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(folded => folded.open = true)")
        if os.environ.get("SCREENSHOTS"):
            height = browser.execute_script("return document.documentElement.scrollHeight")
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": min(height, 9000)})
            time.sleep(0.5)
            browser.save_screenshot(str(Path(os.environ["SCREENSHOTS"], f"{path.stem}-{width}-{scheme}.png")))
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert not [address for address in loaded if not address.startswith(("data:", "file:"))], "no request leaves"
        bare = "[...document.querySelectorAll(arguments[0])].filter(p => !p.closest('[aria-label], [alt]')).length"
        pictures = f"{within} svg, {within} img"
        assert browser.execute_script(f"return {bare}", pictures) == 0, "every picture has a text"
        wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"the page is {wide} pixels wider than the screen"
        light, end = "getComputedStyle(document.body).backgroundColor == 'rgb(255, 255, 255)'", time.monotonic() + 5
        while browser.execute_script(f"return {light}") != (scheme == "light"):
            assert time.monotonic() < end, f"the page is not {scheme}"
            time.sleep(0.1)

    return opened


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    both = [result.outdir for result in runs.values()]
    going = folder / "going"
    going.mkdir()
    for name in ("config.yaml", "data.json", "rows.npz"):
        (going / name).write_bytes((both[0] / name).read_bytes())
    (going / "rounds.jsonl").write_text("".join((both[0] / "rounds.jsonl").read_text().splitlines(True)[:2]))
    return {
        "run": write_page(read_runs(both[:1]), folder / "run.html"),
        "side_by_side": write_page(read_runs(both), folder / "side_by_side.html"),
        "live": write_page(read_runs([going]), folder / "live.html", renew=3),
    }


@pytest.mark.parametrize(
    "name, width, scheme",
    [
        ("run", 1400, "light"),
        ("side_by_side", 400, "dark"),
        *(
            pytest.param(n, w, s, marks=pytest.mark.slow)
            for n in ("run", "live")
            for w, s in ((1400, "dark"), (400, "light"))
        ),
    ],
)
def test_a_page_opens(show, pages, name, width, scheme):
    show(pages[name], width, scheme)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """The page of one experiment of a suite, from the committed results."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "cells").symlink_to(ROOT / "results" / "cells")
    write_report(Options(("one_shot",), "small", "local", str(folder), only=("digits_start",)))
    return folder / "report.html"


@pytest.mark.parametrize("width, scheme", [(1400, "light"), (400, "dark")])
def test_the_page_of_a_suite_opens(browser, show, suite, width, scheme):
    show(suite, width, scheme)
    beside = "getComputedStyle(document.querySelector('.cards td[data-label=verdict]'), '::before').content"
    assert browser.execute_script(f"return {beside}") == ("none" if width > 640 else '"verdict"')


@pytest.mark.skipif(not (ROOT / "site" / "index.html").exists(), reason="make docs builds the site")
@pytest.mark.parametrize("width, scheme", [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("page", [".", "gallery", "leaderboard", "methods", "reference/keys"])
def test_the_site_opens(show, page, width, scheme):
    show(ROOT / "site" / page / "index.html", width, scheme, within="article")  # around it are the icons of the theme


def column(browser, table, index):
    rows = "[...document.querySelectorAll('table')[arguments[0]].tBodies[0].rows]"
    return browser.execute_script(f"return {rows}.map(row => row.cells[arguments[1]].textContent)", table, index)


@pytest.mark.parametrize("name, table, index", [("run", 1, 1)])
def test_a_table_is_sorted_by_a_click(browser, show, pages, name, table, index):
    show(pages[name], 1280, "light")
    before = column(browser, table, index)
    header = browser.find_elements("css selector", "table")[table].find_elements("css selector", "th")[index]
    numbers = all(text.isdigit() for text in before)
    expected = sorted(before, key=int if numbers else lambda text: text.casefold())
    header.click()
    up = column(browser, table, index)
    assert len(set(up)) > 2 and (up == expected if numbers else up[0].casefold() == expected[0].casefold())
    header.click()
    assert column(browser, table, index) == up[::-1] if len(set(up)) == len(up) else up != before
    assert header.get_attribute("aria-sort") == "descending"


@pytest.mark.skipif(not (ROOT / "site" / "index.html").exists(), reason="make docs builds the site")
def test_the_leaderboard_is_sorted_by_a_click(browser, show):
    show(ROOT / "site" / "leaderboard" / "index.html", 1400, "light", within="article")
    header = browser.find_elements("css selector", "article th")[2]  # points against LoRA
    header.click()
    shown = [text.split(" ")[0].replace("−", "-") for text in column(browser, 0, 2)]
    assert len(shown) > 1 and shown == sorted(shown, key=float)


@pytest.mark.parametrize("format, said", [("CSV", ",rolora"), ("LaTeX", r"\begin{tabular}{lr")])
def test_a_table_is_saved(browser, show, pages, tmp_path, format, said):
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    show(pages["run"], 1280, "light")
    browser.find_element("xpath", f"//button[text()='{format}']").click()
    path, end = tmp_path / f"figures.{'csv' if format == 'CSV' else 'tex'}", time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, "nothing was saved"
        time.sleep(0.1)
    assert path.read_text(encoding="utf-8").startswith(said)


def test_the_live_page_renews_itself(browser, show, pages, runs):
    show(pages["live"], 1280, "light")
    shown = "return document.body.innerText"  # of the page as it is now: an element may be gone at the next renewal
    assert "round 2 of" in browser.execute_script(shown)
    write_page(read_runs([runs["classes"].outdir]), pages["live"], renew=1)
    end = time.monotonic() + 60
    while "still running" in (browser.execute_script(shown) or "still running"):
        assert time.monotonic() < end, "the page was not loaded again"
        time.sleep(0.5)
