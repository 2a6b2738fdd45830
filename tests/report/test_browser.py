"""The report page in a real browser: it draws, answers to the pointer, and fits wide and narrow screens."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from shutil import which
from typing import Any

import pytest

from nestpipe.report.page import write_page
from nestpipe.report.run_files import read_runs
from tests.report.runs import write_run, write_trace

FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync"),
)
NEEDED = [name for name in ("chromium", "chromedriver") if which(name) is None]
NEEDED += [] if find_spec("selenium") is not None else ["selenium"]
LONG = "a-folder-whose-name-is-longer-than-a-narrow-screen-is-wide-" + "x" * 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {' and '.join(NEEDED)}, from `make browser` and `make test-slow`"),
]

OUTSIDE = """
const outside = [];
for (const element of document.body.querySelectorAll("*")) {
  if (element.closest(".scroll, #js-plotly-tester, .draglayer")) continue;
  const box = element.getBoundingClientRect();
  if (box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5))
    outside.push(`${element.outerHTML.slice(0, 90)} reaches ${box.right}`);
}
return outside;
"""
"""Elements that stick out of the window. Tables may be wider: they scroll by themselves. Plotly measures texts far
outside the page, and its handles for dragging are invisible."""

COLOURS = """
const bar = document.querySelector("#timeline .bars .point path");
const heading = document.querySelector("#timeline .annotation-text");
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(bar).fill, getComputedStyle(heading).fill];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a page of three runs, one with a long name and one with a trace alone."""
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / "serial", 30.0), write_run(folder / LONG, 20.0), write_trace(folder / "only.json", 10.0)]
    (folder / "report.html").write_text(write_page(read_runs(runs)))
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium") or ""
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))
    yield driver
    driver.quit()


def show(browser: Any, address: str, width: int, scheme: str) -> None:
    """Opens the page in a window of this width, and waits until all figures are drawn."""
    from selenium.webdriver.support.wait import WebDriverWait

    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    prefer(browser, scheme)
    browser.get_log("browser")  # forgets those of earlier pages
    browser.get(address)
    drawn = "return document.documentElement.dataset.drawn === 'true'"
    WebDriverWait(browser, 40).until(lambda driver: driver.execute_script(drawn))


def prefer(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits(browser: Any, page: str, width: int, scheme: str) -> None:
    """Fails if the console has an error, a figure is empty, or anything sticks out of the window."""
    show(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return innerWidth") == width
    for folded in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", folded)
    assert browser.execute_script(OUTSIDE) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    count = (
        "return [...document.querySelectorAll('.plot')].map(plot => [plot.id, plot.querySelectorAll('path').length])"
    )
    marks = dict(browser.execute_script(count))
    assert set(marks) == {"timeline", "parts", "hit-rate", "bytes", "loss", "metric-1"}
    assert min(marks.values()) > 0, marks


def test_hovering(browser: Any, page: str) -> None:
    """Fails if the pointer on a span shows no tooltip, or that of another span."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    show(browser, page, 1280, "light")
    bar = browser.find_element("css selector", "#timeline .bars .point path")
    ActionChains(browser).move_to_element(bar).perform()
    tooltip = "return document.querySelector('#timeline .hoverlayer')?.textContent ?? ''"
    WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(tooltip))
    assert "dense, batch" in browser.execute_script(tooltip)
    assert ", micro-batch 0" in browser.execute_script(tooltip)
    assert "12.00 ms on lane compute" in browser.execute_script(tooltip)


def test_light_and_dark(browser: Any, page: str) -> None:
    """Fails if the page or its figures keep the colours that they were drawn in."""
    from selenium.webdriver.support.wait import WebDriverWait

    show(browser, page, 1280, "light")
    light = browser.execute_script(COLOURS)
    prefer(browser, "dark")
    assert light == ["rgb(255, 255, 255)", "rgb(33, 102, 172)", "rgb(31, 35, 40)"]
    WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(COLOURS)[1] != light[1])
    assert browser.execute_script(COLOURS) == ["rgb(13, 17, 23)", "rgb(107, 167, 229)", "rgb(230, 237, 243)"]


def test_nothing_is_requested(browser: Any, page: str) -> None:
    """Fails if the page asks for anything but itself."""
    browser.get_log("performance")
    show(browser, page, 1280, "light")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {address for address in asked if not address.startswith("data:")} == {page}
