"""The page in a browser: it draws without complaint, answers clicks, and fits a phone."""

import base64
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from orthocond.lab.report import write_report

from synthetic_runs import ALL_METHODS, make_run, make_sweep

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no browser: install Debian's chromium and chromium-driver to test the page",
)
HOSTILE = "svd+<b>bold</b></script><script>document.title='owned'</script>\"'&%{x}雪"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    make_sweep(folder / "runs/a", seeds=3)
    make_run(folder / "runs/a/svd/seed-9", "svd", 9, state="failed")
    make_sweep(
        folder / "runs/b", ("svd", "svd+nog", HOSTILE.replace("/", "\N{DIVISION SLASH}")), 2, preset="gcp-digits"
    )
    for config in (folder / "runs/b").glob("*bold*/*/config.json"):
        config.write_text(config.read_text().replace("\\u2215", "/"))
    return write_report([folder / "runs"], folder / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["webdriver.Chrome"]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "window-size=1200,900",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def load(browser: "webdriver.Chrome", page: Path, *, width: int = 1200, scheme: str = "light") -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready"))
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    keep_picture(browser, f"{scheme}-{width}")


def keep_picture(browser: "webdriver.Chrome", name: str) -> None:
    """Keep a picture of the whole page where REPORT_PICTURES says, for a person to look at."""
    folder = os.environ.get("REPORT_PICTURES")
    if folder:
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(picture["data"]))


def until(is_so, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "the page did not get there in time"
        time.sleep(0.1)


def visible_lines(browser: "webdriver.Chrome", chart: str = "conditioning") -> list[str]:
    """Return the names of the lines that a section's chart shows."""
    script = """
        const plot = document.querySelector(`#section-0 figure[data-chart="${arguments[0]}"] .plot`);
        return plot.data.filter((trace) => trace.name && trace.visible !== false).map((trace) => trace.name);"""
    return browser.execute_script(script, chart)


def test_it_loads_without_complaint_or_network_and_shows_every_method(browser, page):
    load(browser, page)
    assert browser.get_log("browser") == []
    requests = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert not [message for message in requests if '"url":"http' in message]
    assert page.stat().st_size < 5e6
    text = browser.find_element(By.ID, "section-0").text
    for method in ALL_METHODS:
        assert method in text
    assert "has the lowest validation error" in text
    assert "svd, seed 9: failed" in text
    assert set(visible_lines(browser)) == set(ALL_METHODS) - {"bn"}
    drawn = browser.execute_script("return document.querySelectorAll('#section-0 .plot .main-svg').length")
    assert drawn >= 7  # errors, five curves, times


def test_a_legend_entry_hides_and_shows_a_method_in_every_chart(browser, page):
    load(browser, page)
    entry = browser.find_element(By.CSS_SELECTOR, '#section-0 .legend button[data-method="svd+nog"]')
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    for chart in ("conditioning", "rank", "progress"):
        until(lambda chart=chart: "svd+nog" not in visible_lines(browser, chart))
        assert "svd" in visible_lines(browser, chart)
    entry.click()
    until(lambda: "svd+nog" in visible_lines(browser))
    entry.click()
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('dblclick'))", entry)
    until(lambda: visible_lines(browser) == ["svd+nog"])


def test_the_condition_numbers_definition_can_be_chosen(browser, page):
    load(browser, page)
    script = """
        const plot = document.querySelector('#section-0 figure[data-chart="conditioning"] .plot');
        return plot.data.find((trace) => trace.name === "svd").y;"""
    seen = [browser.execute_script(script)]
    buttons = browser.find_elements(By.CSS_SELECTOR, '#section-0 figure[data-chart="conditioning"] .views button')
    assert [button.text for button in buttons] == ["with eps", "on the support", "raw"]
    for button in buttons[1:]:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        until(lambda: browser.execute_script(script) not in seen)
        seen.append(browser.execute_script(script))
        assert button.get_attribute("aria-pressed") == "true"
    assert max(seen[1]) < 1e5 < min(seen[2])


def test_hovering_shows_values(browser, page):
    load(browser, page)
    plot = browser.find_element(By.CSS_SELECTOR, '#section-0 figure[data-chart="conditioning"] .plot')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    webdriver.ActionChains(browser).move_to_element(plot).perform()
    until(lambda: "svd+nog+ow+olr" in plot.text and " to " in plot.text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, page, scheme):
    load(browser, page, width=390, scheme=scheme)
    widths = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths == [390, 390]
    script = """
        const parts = [...document.querySelectorAll(".plot, h1, .message, details, .views")];
        return parts.filter((part) => part.getBoundingClientRect().right > 391).map((part) => part.className);"""
    assert browser.execute_script(script) == []
    assert browser.get_log("browser") == []


def test_on_a_phone_the_condition_number_is_visible_without_scrolling(browser, page):
    load(browser, page, width=420)
    script = """
        return [...document.querySelectorAll("table.errors")].map((table) => {
          const at = [...table.querySelectorAll("thead th")].findIndex((cell) => cell.textContent === "cond");
          return Math.max(...[...table.rows].map((row) => row.cells[at].getBoundingClientRect().right));
        });"""
    edges = browser.execute_script(script)
    assert len(edges) == 2
    assert max(edges) <= 420


def test_the_chart_of_errors_zooms_and_unzooms(browser, page):
    load(browser, page)
    script = """
        const plot = document.querySelector('#section-0 figure[data-chart="progress"] .plot');
        return plot._fullLayout.yaxis.range;"""
    zoomed = browser.execute_script(script)
    button = browser.find_element(By.CSS_SELECTOR, '#section-0 figure[data-chart="progress"] [data-zoom="false"]')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    until(lambda: browser.execute_script(script)[1] > 1.5 * zoomed[1])
    assert button.get_attribute("aria-pressed") == "true"


def test_ticks_within_a_decade_are_whole_numbers_and_epochs_are_integers(browser, page):
    load(browser, page)
    script = """
        return ["loss", "progress"].map((chart) => {
          const {xaxis, yaxis} = document.querySelector(`#section-0 figure[data-chart="${chart}"] .plot`)._fullLayout;
          return [yaxis.type, yaxis.tickformat, xaxis.dtick];
        });"""
    (kind, tickformat, _), (*_, step) = browser.execute_script(script)
    assert (kind, tickformat) == ("log", "~g")
    assert step == int(step)


def test_no_mark_has_a_method_s_colour_and_svd_is_named_as_the_baseline(browser, page):
    load(browser, page)
    script = """
        const colours = Object.values(JSON.parse(document.getElementById("data").textContent).styles);
        const rgb = (hex) => `rgb(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(", ")})`;
        const own = new Set(colours.filter((style) => style.dash === "solid").map((style) => rgb(style.light)));
        own.delete(getComputedStyle(document.body).color);
        return [...document.querySelectorAll(".best, .best sup, .verdict")]
          .filter((mark) => own.has(getComputedStyle(mark).color)).map((mark) => mark.textContent);"""
    assert browser.execute_script(script) == []
    marked = browser.find_elements(By.CSS_SELECTOR, "table.errors .tag")
    assert [tag.find_element(By.XPATH, "..").text.split() for tag in marked] == [["svd", "baseline"]] * 2


def test_the_theme_follows_the_system_until_it_is_chosen(browser, page):
    background = "return getComputedStyle(document.body).backgroundColor"
    load(browser, page, scheme="light")
    light = browser.execute_script(background)
    load(browser, page, scheme="dark")
    dark = browser.execute_script(background)
    assert light != dark
    browser.find_element(By.ID, "theme").click()
    assert browser.execute_script(background) == light
    browser.execute_script("localStorage.clear()")


def test_it_prints_on_paper_in_light_colours(browser, page):
    load(browser, page, scheme="dark")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(base64.b64decode(printed)) > 50_000
    assert browser.get_log("browser") == []


def test_a_hostile_name_is_shown_as_text(browser, page):
    load(browser, page)
    assert browser.title != "owned"
    assert browser.execute_script("return document.querySelectorAll('main b').length") == 0
    section = browser.find_element(By.ID, "section-1")
    rows = section.find_elements(By.CSS_SELECTOR, "table.errors tbody th")
    assert HOSTILE in [row.text for row in rows]
    script = """
        const labels = document.querySelectorAll("#section-1 figure[data-kind=errors] .ytick text");
        return [...labels].map((label) => label.textContent);"""
    assert HOSTILE in browser.execute_script(script)
