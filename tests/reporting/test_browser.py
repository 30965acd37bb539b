"""The page in a real browser, during and after a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, loopback, raceme, wait_until

from raceme.core.config import RunConfig
from raceme.core.events import (
    ACCURACY,
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    Evaluated,
    Measure,
    Measured,
    MeasureSchema,
    RunEnded,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
    VersionDecided,
)
from raceme.records.folder import begin, only_writer
from raceme.records.store import RunStore
from raceme.reporting.dashboard.server import watching

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.pictures,
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver"),
]
NAMES = (
    "return [...document.querySelectorAll('#panel-runs tbody th bdi')].map((b) => b.textContent)"
)
"""The runs in the overview table, in its order."""
HOSTILE = "\u202e<img src=x onerror=alert(1)>\u2066\u202d" + "<b>" * 33
"""128 characters, the maximum of a client's name."""


class Browser:
    """Headless Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, address: str) -> None:
        self.driver.get(address)
        self.until(lambda: self.run("return Boolean(window.raceme)"))

    def until(self, condition: Callable[[], Any], seconds: float = 180.0) -> Any:
        return wait_until(condition, seconds, self.describe)

    def describe(self) -> str:
        return str(self.driver.find_element("tag name", "body").text)[:3000]

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **shape)

    def cut(self) -> list[str]:
        """Return the parts of the page that are wider than the window."""
        return self.run(
            "return [document.documentElement, ...document.querySelectorAll('.scroll, figure')]"
            ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.ariaLabel)"
        )

    def tile(self, name: str) -> str:
        return str(self.run(f"return document.querySelector('[data-tile={name}]').textContent"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    found = Browser(chromium)
    found.resize(1300, 900)
    found.complaints()
    yield found
    assert found.complaints() == []
    found.driver.get("about:blank")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    keys = ("--max-updates", "240", "--set", "workers=0", "--out", str(out))
    command = [sys.executable, "-c", "from raceme.cli import main; main()", "run", *keys]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture
def replayed(finished: Path, browser: Browser) -> Iterator[Browser]:
    with watching(finished, "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.until(lambda: "The run has ended" in browser.describe())
        yield browser


def test_the_numbers_are_those_of_the_summary(replayed: Browser, finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    replayed.until(lambda: replayed.tile("updates") == str(summary["updates"]))
    assert replayed.tile("accuracy") == f"{summary['accuracy']:.3f}"
    assert replayed.tile("clusters") == str(summary["clusters"])
    assert replayed.tile("rejected") == str(summary["rejected_updates"])
    shown = replayed.describe()
    assert f"best {summary['best_accuracy']:.3f}" in shown
    assert f"purity {summary['purity']:.3f}" in shown
    assert summary["reason"] in shown
    # Panels above grow when they are drawn, and push the table out of view.
    rows = (
        "const table = raceme.board.panels.at(-1); table.element.scrollIntoView();"
        "return table.rows?.length"
    )
    assert replayed.until(lambda: replayed.run(rows)) == summary["clients"]
    sizes = replayed.run(
        "return Object.fromEntries([...raceme.board.moment.members()]"
        ".map(([k, found]) => [k, found.length]))"
    )
    assert sizes == summary["cluster_sizes"]


def test_the_slider_and_the_play_button_show_other_moments(replayed: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = replayed.driver.find_element("css selector", "input[type=range]")
    slider.send_keys(Keys.HOME)
    replayed.until(lambda: replayed.tile("updates") == "0")
    assert replayed.tile("clusters") == "1"
    half = "const [s] = arguments; s.value = 500; s.dispatchEvent(new Event('input'))"
    replayed.run(half, slider)
    replayed.until(lambda: 60 < int(replayed.tile("updates")) < 180)
    play = replayed.driver.find_element("css selector", ".play")
    before = int(replayed.tile("updates"))
    play.click()
    assert play.text == "Pause"
    replayed.until(lambda: int(replayed.tile("updates")) > before)
    replayed.driver.find_element("css selector", ".latest").click()
    replayed.until(lambda: replayed.tile("updates") == "240")


@pytest.mark.parametrize(("width", "scale"), [(390, 1.0), (640, 2.0), (320, 1.0)])
def test_a_phone_and_a_large_zoom_show_all_of_it(
    replayed: Browser, width: int, scale: float
) -> None:
    """A window of 1,280 pixels at 200 % zoom has 640 CSS pixels."""
    replayed.resize(width, 800, scale)
    inside = "return document.documentElement.scrollWidth <= innerWidth"
    replayed.until(lambda: replayed.run(inside))
    for panel in replayed.driver.find_elements("css selector", ".panel"):
        if panel.is_displayed():
            replayed.run("arguments[0].scrollIntoView()", panel)
            assert panel.size["width"] <= width
            assert panel.size["height"] > 60
    if width == 390:
        replayed.until(lambda: replayed.cut() == [])
    small = replayed.run(
        "return [...document.querySelectorAll('#dashboard button, #dashboard select')]"
        ".filter((one) => one.offsetParent && one.getBoundingClientRect().height < 23)"
        ".map((one) => one.textContent)"
    )
    assert small == [], "fingers need 24 pixels"


def test_a_key_closes_a_panel_that_a_click_opened(replayed: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    replayed.run("document.getElementById('panel-clients').scrollIntoView()")
    find = "return document.querySelector('[data-client=\"7\"]')"
    button = replayed.until(lambda: replayed.run(find))
    button.click()
    detail = replayed.driver.find_element("css selector", ".detail")
    replayed.until(detail.is_displayed)
    assert "client-7" in detail.text
    replayed.until(lambda: replayed.run("return document.activeElement.id") == "title-detail")
    replayed.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    replayed.until(lambda: not detail.is_displayed())
    assert replayed.run("return document.activeElement.dataset.client") == "7"
    chip = replayed.driver.find_element("css selector", ".chip")
    replayed.run("arguments[0].click()", chip)
    replayed.until(lambda: "Members" in detail.text)


CHART = "const chart = raceme.board.panels[0].chart;"


def test_a_chart_zooms_and_keeps_its_zoom(replayed: Browser) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def shown() -> list[float]:
        found = f"{CHART} const {{ min, max }} = chart.plot.scales.x; return [min, max]"
        low, high = replayed.until(lambda: replayed.run(found))
        return [low, high]

    whole = shown()
    area = replayed.driver.find_element("css selector", "#panel-accuracy .u-over")
    mouse = ActionChains(replayed.driver)
    mouse.move_to_element_with_offset(area, -200, 0).click_and_hold().move_by_offset(150, 0)
    mouse.release().perform()
    replayed.until(lambda: shown() != whole)
    zoomed = shown()
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    replayed.until(lambda: "s):" in replayed.run(f"{CHART} return chart.where.textContent"))
    # New events do not change the zoom.
    replayed.run("raceme.run.revision += 1; raceme.board.changed()")
    replayed.run("return new Promise((done) => requestAnimationFrame(() => done()))")
    assert shown() == zoomed
    chart = replayed.driver.find_element("css selector", "#panel-accuracy .chart")
    chart.send_keys(Keys.ARROW_RIGHT)
    assert shown()[0] > zoomed[0]
    chart.send_keys("-")
    assert shown()[1] - shown()[0] > zoomed[1] - zoomed[0]
    chart.send_keys("0")
    assert shown() == whole


def test_a_chart_smooths_and_has_logarithmic_axes(replayed: Browser) -> None:
    set_to = "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
    values = f"{CHART} return chart.plot.data.at(-1)"
    raw = replayed.until(lambda: replayed.run(values))
    smoothing = "#panel-accuracy [aria-label=Smoothing]"
    replayed.run(f"{set_to} e.dispatchEvent(new Event('input'))", smoothing, "0.5")
    weighted, expected = 0.0, []
    for number, value in enumerate(raw, 1):
        weighted = 0.5 * weighted + 0.5 * value
        expected.append(weighted / (1 - 0.5**number))
    assert replayed.run(values) == pytest.approx(expected)
    for scale, least in (("x", 0), ("y", 1)):
        change = f"{set_to} e.dispatchEvent(new Event('change'))"
        replayed.run(change, "#panel-accuracy [aria-label=Scale]", scale)
        found = replayed.run(f"{CHART} return chart.plot.data[arguments[0]][0]", least)
        assert found > 0
        assert replayed.run(f"{CHART} return chart.plot.scales[arguments[0]].distr", scale) == 3


def test_a_chart_is_saved_as_csv_and_as_a_picture(replayed: Browser, tmp_path: Path) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    replayed.command("Browser.setDownloadBehavior", **where)
    press = (
        "[...document.querySelectorAll('#panel-accuracy .tools button')]"
        ".find((one) => one.textContent === arguments[0]).click()"
    )
    replayed.until(lambda: replayed.run(f"{CHART} return Boolean(chart.plot)"))
    for kind in ("CSV", "PNG"):
        replayed.run(press, kind)
        replayed.until(lambda kind=kind: list(tmp_path.glob(f"*.{kind.lower()}")))
    (table,) = tmp_path.glob("*.csv")
    lines = table.read_text().splitlines()
    assert lines[0].startswith('"virtual time (s)",')
    assert lines[0].endswith('"mean of the clients"')
    assert len(lines) - 1 == replayed.run("return raceme.run.tables.evaluations.rows")
    button = "[...document.querySelectorAll(`#panel-${arguments[0]} button`)]"
    for panel in ("clusters", "map", "devices", "staleness"):
        drawn = f"return document.querySelector('#panel-{panel} canvas').width > 0"
        replayed.run(f"document.querySelector('#panel-{panel}').scrollIntoView()")
        replayed.until(lambda drawn=drawn: replayed.run(drawn))
        replayed.run(f"{button}.find((one) => one.textContent === 'PNG').click()", panel)
    pictures = replayed.until(lambda: len(found := list(tmp_path.glob("*.png"))) == 5 and found)
    assert {path.stem for path in pictures} == {
        "accuracy-over-time-mean-worst-tenth-and-each-cluster",
        "clusters-over-time",
        "map-of-the-clients",
        "devices-at-work",
        "staleness-of-the-updates",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_the_theme_is_switched_and_panels_have_help(replayed: Browser) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    choose = (
        "const s = document.querySelector('[aria-label=Theme]'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('change'))"
    )
    replayed.run(choose, "dark")
    dark = replayed.run(paper)
    replayed.run(choose, "light")
    assert replayed.run(paper) != dark
    replayed.run(choose, "system")
    summary = replayed.driver.find_element("css selector", "#panel-clusters summary")
    replayed.run("arguments[0].scrollIntoView({block: 'center'})", summary)
    summary.click()
    assert "Purity is the share" in replayed.describe()
    helped = "return [...document.querySelectorAll('.panel:not(.detail)')]"
    assert replayed.run(f"{helped}.filter((one) => !one.querySelector('.help')).length") == 0


def test_paper_gets_all_panels_in_light_colours(replayed: Browser) -> None:
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    replayed.command("Emulation.setEmulatedMedia", features=dark)
    paper = "return getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
    shown = replayed.run(paper)
    table = "return raceme.board.panels.at(-1).rows?.length ?? 0"
    assert replayed.run(table) == 0, "out of sight"
    replayed.run("dispatchEvent(new Event('beforeprint'))")
    assert replayed.run(table) == 40
    assert luminance(replayed.run(paper)) > 0.8
    replayed.run("dispatchEvent(new Event('afterprint'))")
    assert replayed.run(paper) == shown
    replayed.command("Emulation.setEmulatedMedia", features=[])


def test_crashes_and_devices_are_told_in_words(browser: Browser, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        for name in ("pi-1", "pi-2"):
            store.observe(ClientJoined(0.0, name, 0, 10, None))
        store.observe(UpdateRejected(50.0, "pi-1", "error 5: no reason given", 40.0))
        store.observe(ClientLeft(60.0, "pi-2"))
        store.observe(ClientJoined(80.0, "pi-2", 0, 10, None))
        worse, chosen = "accuracy 0.6, 0.9 of the one in use", "an operator has chosen another"
        for time, version, outcome, reason in (
            *((81.0, 6, "in-use", ""), (82.0, 7, "held", worse), (83.0, 6, "in-use", "a choice")),
            *((84.0, 8, "held", chosen), (85.0, 9, "held", chosen)),
        ):
            store.observe(VersionDecided(time, 2, version, outcome, None, reason))
    (tmp_path / "run" / "error.txt").write_text("Traceback\nValueError: no data\n")
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.resize(1300, 3000)
        browser.until(lambda: "The run failed" in browser.describe())
        lines = "return [...document.querySelectorAll('.happenings li')].map((l) => l.innerText)"
        found = browser.until(lambda: browser.run(lines))
    assert [line.split("\n")[1:] for line in found] == [
        ["crash", "The run failed: ValueError: no data"],
        ["held", "versions 8–9 of cluster 2: an operator has chosen another"],
        ["in-use", "version 6 of cluster 2: a choice"],
        ["held", "version 7 of cluster 2: accuracy 0.6, 0.9 of the one in use"],
        ["online", "pi-2"],
        ["offline", "pi-2"],
        ["rejected", "pi-1: the device went offline"],
    ]


def test_a_run_that_is_killed_is_not_live(browser: Browser, tmp_path: Path) -> None:
    keys = ("--max-updates", "1000000", "--set", "workers=0", "--out", str(tmp_path / "runs" / "a"))
    command = [sys.executable, "-c", "from raceme.cli import main; main()", "run", *keys]
    with (
        watching(tmp_path / "runs" / "a", "127.0.0.1", 0) as page,
        watching(tmp_path / "runs", "127.0.0.1", 0, comparison=True) as index,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run,
    ):
        status = "return document.querySelector('.status').textContent"
        state = "return document.querySelector('.runs td[data-head=state]')?.textContent"
        try:
            browser.open(page.address)
            browser.until(lambda: browser.run(status) == "Live" and browser.tile("updates") != "0")
            run.kill()
            browser.until(lambda: browser.run(status).startswith("The run was killed"))
            browser.open(index.address)
            browser.until(lambda: browser.run(state) == "stopped")
            browser.until(lambda: "0/1 runs finished, 1 stopped." in browser.run(status))
        finally:
            run.kill()


def test_a_run_without_clients_has_no_empty_charts(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunStore(run) as store, only_writer(run), watching(run, "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        status = "return document.querySelector('.status').textContent"
        browser.until(
            lambda: browser.run(status) == "Waiting for the run to begin: it loads its data."
        )
        (run / "config.toml").write_text('strategy = "panicle"\ndataset = "npz"\nseed = 0\n')
        browser.until(lambda: browser.run(status).startswith("Waiting for the first client: all "))
        shown = "return [...document.querySelectorAll('.panel')].some((one) => one.offsetParent)"
        browser.until(lambda: browser.run("return !raceme.run.loading"))
        assert not browser.run(shown)
        store.observe(ClientJoined(0.0, "oven", 0, 10, None))
        store.commit()
        browser.until(lambda: browser.run(shown))
        axis = "return raceme.board.panels[0].chart.plot?.scales.x.max"
        assert browser.until(lambda: browser.run(axis)) == 1


def test_a_run_of_months_has_days_on_its_axes(browser: Browser, tmp_path: Path) -> None:
    day = 86400.0
    with RunStore(tmp_path / "run") as store:
        for name in ("oven", "pump"):
            store.observe(ClientJoined(0.0, name, 0, 10, None))
        store.observe(ClustersChanged(1.0, 0, ClusterChange.ASSIGN, {"oven": {0: 1.0}}, made=(0,)))
        moved = {"oven": {7: 1.0}}
        store.observe(ClustersChanged(9.5 * day, 5, ClusterChange.MOVE, moved))
        for seq in range(1, 3101):
            time = 40 * day - (3100 - seq) * 10
            store.observe(UpdateApplied(seq, time, "pump", 0, 0, 1, 0.5, time - 8, 0.1, 8, 8))
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.resize(1300, 3000)
        browser.until(lambda: browser.tile("time") == "40 d 00:00")
        browser.until(lambda: "9 d 12:00\nmove\noven → cluster 7" in browser.describe())
        # Only the last 1,500 bars are shown: the hours of forty days.
        texts = (
            "const found = []; const panel = raceme.board.panels.find((p) => p.rowHeight);"
            "const real = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = (text) => found.push(text);"
            "panel.draw(raceme.board.moment);"
            "CanvasRenderingContext2D.prototype.fillText = real; return found"
        )
        drawn = browser.run(texts)
        assert drawn[-1] == "time (d)" or drawn[-1] == "virtual time (d)"
        assert len(drawn) == len(set(drawn)) > 6


def test_many_runs_are_drawn_as_the_means_of_their_methods(
    browser: Browser, finished: Path, tmp_path: Path
) -> None:
    for number in range(14):
        shutil.copytree(finished, tmp_path / f"method-{number // 2}" / f"seed-{number % 2}")
    with watching(tmp_path, "127.0.0.1", 0, comparison=True) as beside:
        browser.open(beside.address)
        legend = "return [...document.querySelectorAll('.legend bdi')].map((b) => b.textContent)"
        means = [f"method-{number} (2 runs)" for number in range(7)]
        browser.until(lambda: browser.run(legend) == means)
        pick = "const s = document.querySelector('[aria-label=Lines]');"
        assert browser.run(f"{pick} return s.value") == "mean"
        browser.run(f"{pick} s.value = 'runs'; s.dispatchEvent(new Event('change'))")
        browser.until(lambda: browser.run("return raceme.board.chart.shown.lines.length") == 14)
        assert browser.run(legend) == [f"method-{number}" for number in range(7)]


def test_an_index_lists_filters_and_compares_runs(
    browser: Browser, finished: Path, tmp_path: Path
) -> None:
    for age, name in enumerate(("new", "old", "cmp/casa/seed-0", "cmp/casa/seed-1")):
        shutil.copytree(finished, tmp_path / name)
        os.utime(tmp_path / name / "config.toml", (1e9 - age, 1e9 - age))
    with watching(tmp_path, "127.0.0.1", 0, comparison=True) as beside:
        browser.open(beside.address)
        browser.until(lambda: "4/4 runs finished" in browser.describe())
        # Two comparisons may contain runs of the same name.
        ordered = ["new", "old", "cmp / casa, seed 0", "cmp / casa, seed 1"]
        browser.until(lambda: browser.run(NAMES) == ordered)
        legend = "return [...document.querySelectorAll('.legend bdi')].map((b) => b.textContent)"
        # Each method has one entry in the legend.
        browser.until(lambda: browser.run(legend) == ["casa"])
        lines = "return raceme.board.chart.shown.lines.length"
        assert browser.run(lines) == 4
        browser.driver.find_element("css selector", "[aria-label='Draw old']").click()
        browser.until(lambda: browser.run(lines) == 3)
        browser.resize(390, 800)
        accuracy = browser.driver.find_element("css selector", "#panel-runs td[data-head=accuracy]")
        browser.until(lambda: 0 < accuracy.rect["x"] + accuracy.rect["width"] < 390)
        browser.resize(1300, 900)
        browser.driver.find_element("css selector", "input[type=search]").send_keys("cmp")
        browser.until(lambda: browser.run(NAMES) == ordered[2:])
        pick = "const s = document.querySelector('[aria-label=Lines]'); s.value = 'mean';"
        browser.run(f"{pick} s.dispatchEvent(new Event('change'))")
        browser.until(lambda: browser.run(legend) == ["casa (2 runs)"])
        bands = "return raceme.board.chart.plot.bands.length"
        assert browser.run(bands) == 1
        browser.run("document.querySelector('#panel-runs a').click()")
        browser.until(lambda: "The run has ended" in browser.describe())


def test_the_table_sorts_and_searches(replayed: Browser) -> None:
    replayed.run("document.getElementById('panel-clients').scrollIntoView()")
    first = "return document.querySelector('.clients tbody .link')?.textContent"
    replayed.until(lambda: replayed.run(first) == "client-0")
    updates = "return [...document.querySelectorAll('.clients thead button')][5].click()"
    replayed.run(updates)
    most = replayed.run("return Math.max(...raceme.board.moment.updates)")
    top = "return document.querySelector('.clients tbody tr:nth-child(1) td:nth-child(6)')"
    replayed.until(lambda: replayed.run(f"{top}.textContent") == str(most))
    search = replayed.driver.find_element("css selector", "input[type=search]")
    search.send_keys("client-33")
    replayed.until(lambda: replayed.run(first) == "client-33")


def test_the_table_shows_and_finds_labels(browser: Browser, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, "oven", 0, 10, None, labels="room=kitchen,floor=1"))
        store.observe(ClientJoined(0.0, "pump", 0, 10, None, labels="room=garden"))
        store.observe(ClientJoined(0.0, "spare", 0, 10, None))
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.resize(1300, 3000)
        names = "return [...document.querySelectorAll('.clients tbody th')].map((t) => t.innerText)"
        everyone = ["oven room=kitchen,floor=1", "pump room=garden", "spare"]
        browser.until(lambda: [text.strip() for text in browser.run(names)] == everyone)
        browser.driver.find_element("css selector", "input[type=search]").send_keys("GARDEN")
        browser.until(lambda: browser.run(names) == ["pump room=garden"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(replayed: Browser, theme: str) -> None:
    """WCAG 2.1 AA requires a contrast of 4.5 for text."""
    replayed.command(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
    )
    named = "const s = getComputedStyle(document.documentElement);"
    for text in ("ink", "muted", "accent", "alarm"):
        for behind in ("card", "paper", "tint"):
            pair = replayed.run(
                f"{named} return ['{text}', '{behind}']"
                ".map((name) => s.getPropertyValue(`--${name}`).trim())"
            )
            assert contrast(*pair) >= 4.5, (theme, text, behind)
    # WCAG requires a contrast of 3 for graphics: lines, dots and streams of clusters.
    card = replayed.run(f"{named} return s.getPropertyValue('--card').trim()")
    colours = [
        replayed.run("return raceme.clusterColour(arguments[0])", cluster) for cluster in range(17)
    ]
    assert len(set(colours)) == 17, "sixteen clusters besides the first are told apart"
    for cluster, colour in enumerate(colours):
        assert contrast(colour, card) >= 3, (theme, cluster)
    replayed.command("Emulation.setEmulatedMedia", features=[])


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_split_appears_while_the_run_goes_on(browser: Browser, tmp_path: Path) -> None:
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        with RunStore(tmp_path / "run") as store:
            for name in "abcd":
                store.observe(ClientJoined(0.0, name, 0, 10, None))
            everybody = {name: {0: 1.0} for name in "abcd"}
            store.observe(ClustersChanged(0.0, 0, ClusterChange.ASSIGN, everybody, made=(0,)))
            store.commit()
            browser.open(beside.address)
            # All panels are in view, because others are not drawn.
            browser.resize(1300, 3000)
            browser.until(lambda: "Live" in browser.describe())
            browser.until(lambda: browser.tile("clusters") == "1")
            split = {"a": {1: 1.0}, "b": {1: 1.0}, "c": {2: 1.0}, "d": {2: 1.0}}
            event = ClustersChanged(5.0, 4, ClusterChange.SPLIT, split, (0,), (1, 2))
            store.observe(UpdateApplied(1, 5.0, "a", 0, 0, 0, 0.5, 0.5, 1.0, 8, 8))
            store.observe(event)
            browser.until(lambda: browser.tile("clusters") == "2")
            browser.until(lambda: "cluster 0 → clusters 1, 2 (4 clients)" in browser.describe())
            chips = "return document.querySelector('.chips').textContent"
            assert browser.run(chips) == "cluster 12cluster 22"
            store.observe(RunEnded(6.0, 1, "enough"))
        browser.until(lambda: "The run has ended" in browser.describe())
    browser.until(lambda: "was closed" in browser.describe())
    assert browser.tile("updates") == "1"


def test_real_devices_are_seen_as_they_come_and_work(browser: Browser, tmp_path: Path) -> None:
    keys = ("--strategy", "fedasync", "--clients", "2", "--groups", "0.5,0.5")
    keys += ("--max-updates", "400", "--eval-every", "20", "--metrics", "off")
    page = ("--watch", "--watch-address", "127.0.0.1:0")
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        place = ("--address", bed.fleet_address, "--out", "out")
        server = bed.start("serve", raceme("serve", *place, *keys, *page))
        address = server.wait_for(r"Dashboard: (http://\S+)", 120)[1]
        browser.open(address)
        browser.resize(1300, 3000)
        browser.until(lambda: "Waiting for the first client" in browser.describe())
        for number in range(2):
            partition = f"partition-id={number} num-partitions=2"
            bed.device("--insecure", "--node-config", partition)
        browser.until(lambda: "2 of 2 clients online" in browser.describe(), 120)
        browser.until(lambda: 0 < int(browser.tile("updates")) < 400, 120)
        assert "Live" in browser.describe()
        assert server.wait(120) == 0
        browser.until(lambda: "was closed" in browser.describe())
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert browser.tile("updates") == str(summary["updates"]) == "400"
        assert browser.tile("accuracy") == f"{summary['accuracy']:.3f}"
        names = "return [...raceme.run.tables.clients.name].sort()"
        assert browser.run(names) == ["client-0", "client-1"]


def test_the_address_that_is_printed_logs_in(browser: Browser, finished: Path) -> None:
    with watching(finished, "0.0.0.0", 0) as beside:
        # Another host name of this machine, as cookies are per host.
        port = beside.address.split(":")[2].partition("/")[0]
        browser.driver.get(f"http://127.0.0.1:{port}/#wrong")
        assert browser.run("return document.querySelector('[type=password]').name") == "token"
        assert [one for one in browser.complaints() if "403" not in one] == []
        browser.driver.get("about:blank")
        browser.open(f"http://127.0.0.1:{port}/#{beside.address.partition('#')[2]}")
        browser.until(lambda: "The run has ended" in browser.describe())
        assert "token" not in browser.run("return location.href")
        assert [one for one in browser.complaints() if "403" not in one] == []


def test_names_and_reasons_of_strangers_change_nothing(browser: Browser, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, HOSTILE, 0, 10, 0))
        store.observe(ClientLeft(1.0, HOSTILE))
        store.observe(UpdateRejected(2.0, HOSTILE, f"said {HOSTILE}", 1.0))
        store.observe(UpdateJudged(2.0, HOSTILE, Verdict.EXCLUDED, 1.0, 0.5, HOSTILE, None))
        store.observe(Evaluated(3.0, 0, 0.5, 0.5, 1, {HOSTILE: (0, 0.5, 0.5)}))
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.resize(1300, 3000)
        link = "return document.querySelector('.clients .link bdi')"
        name = browser.until(lambda: browser.run(link))
        shown = browser.run("return arguments[0].textContent", name)
        assert shown == HOSTILE[:80] + "…"
        assert browser.run("return arguments[0].title", name) == HOSTILE
        browser.run("arguments[0].parentElement.click()", name)
        browser.until(lambda: browser.run("return !document.querySelector('.detail').hidden"))
        # The markup in the name has created no image and no bold text.
        assert browser.run("return document.querySelectorAll('img, b').length") == 0
        browser.until(lambda: "excluded" in browser.describe())


def test_a_comparison_shows_all_curves_and_leads_to_its_runs(
    browser: Browser, finished: Path, tmp_path: Path
) -> None:
    for method in ("casa", "fedasync"):
        for seed in ("seed-0", "seed-1"):
            (tmp_path / method).mkdir(exist_ok=True)
            shutil.copytree(finished, tmp_path / method / seed)
    with watching(tmp_path, "127.0.0.1", 0, comparison=True) as beside:
        browser.open(beside.address)
        browser.until(lambda: "4/4 runs finished" in browser.describe())
        legend = "return [...document.querySelectorAll('.legend bdi')].map((b) => b.textContent)"
        browser.until(lambda: browser.run(legend) == ["casa (2 runs)", "fedasync (2 runs)"])
        browser.driver.find_element("link text", "fedasync, seed 1").click()
        browser.until(lambda: "The run has ended" in browser.describe())
        browser.until(lambda: browser.tile("updates") == "240")


def test_a_suite_of_cases_shows_the_case_that_is_picked(
    browser: Browser, finished: Path, tmp_path: Path
) -> None:
    for case, method in (("digits", "casa"), ("har", "fedasync")):
        shutil.copytree(finished, tmp_path / case / method / "seed-0")
    with watching(tmp_path, "127.0.0.1", 0, comparison=True) as beside:
        browser.open(beside.address)
        browser.until(lambda: "2/2 runs finished" in browser.describe())
        legend = "return document.querySelector('.legend').textContent"
        browser.until(lambda: browser.run(legend) == "casa")
        pick = "const s = document.querySelector('[aria-label=Case]'); s.value = 'har';"
        browser.run(f"{pick} s.dispatchEvent(new Event('change'))")
        browser.until(lambda: browser.run(legend) == "fedasync")
        browser.driver.find_element("link text", "fedasync, seed 0").click()
        browser.until(lambda: "The run has ended" in browser.describe())
        browser.until(lambda: browser.tile("updates") == "240")


def test_the_map_shows_the_snapshot_of_the_moment(replayed: Browser) -> None:
    panel = "const map = raceme.board.panels.find((one) => one.element.id === 'panel-map');"
    replayed.run("document.getElementById('panel-map').scrollIntoView()")
    times = replayed.run("return raceme.run.frames.map(({ time }) => time)")
    assert len(times) >= 5

    def is_shown(time: float) -> bool:
        return bool(replayed.run(f"{panel} return map.shownFrame?.time") == time)

    for time, latest in ((times[1] + 1e-6, times[1]), (times[3] - 1e-6, times[2])):
        replayed.run("raceme.board.clock.show(arguments[0])", time)
        replayed.until(partial(is_shown, latest))
    replayed.run("raceme.board.clock.show(0)")
    note = f"{panel} return map.note.textContent"
    replayed.until(lambda: "Each disc is a cluster" in replayed.run(note))
    # Nearest neighbours are of the same true group, since the digits' four groups are easy.
    replayed.run("raceme.board.clock.follow()")
    replayed.until(lambda: "with similar models" in replayed.run(note))
    of_group = (
        f"{panel} const {{ group }} = raceme.board.moment; const {{ dots, x, y }} = map.found;"
        "return dots.filter((one, i) => {"
        "  const away = (j) => j === i ? Infinity : (x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2;"
        "  const near = dots.reduce((best, _, j) => away(j) < away(best) ? j : best, i);"
        "  return group[dots[near]] === group[one]; }).length / dots.length"
    )
    assert replayed.run(of_group) >= 0.9


def test_a_report_works_from_a_file(browser: Browser, finished: Path, tmp_path: Path) -> None:
    from raceme.reporting.page import write_page
    from raceme.reporting.run_page import run_page

    write_page(tmp_path / "report.html", run_page(finished, ""))
    browser.open((tmp_path / "report.html").as_uri())
    browser.until(lambda: browser.tile("updates") == "240")
    slider = browser.driver.find_element("css selector", "input[type=range]")
    half = "const [s] = arguments; s.value = 500; s.dispatchEvent(new Event('input'))"
    browser.run(half, slider)
    browser.until(lambda: 60 < int(browser.tile("updates")) < 180)
    # Only figures that the dashboard lacks follow below it.
    assert browser.run("return document.querySelectorAll('main figure').length") == 1
    browser.resize(390, 844)
    browser.until(lambda: browser.cut() == [])


GAP = MeasureSchema("gap", "distance to the start", ("client", "gap"), unit="m")
LOAD = MeasureSchema("load", "updates of a cluster", ("load",), per="cluster")
WAIT = MeasureSchema("wait", "waiting in a window", ("s", "of"), value="s", of="of", summary="none")
LINKS = MeasureSchema("links", "links between clusters", ("sources",), per="cluster")


def test_measures_of_a_method_have_charts_and_tables(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunStore(out) as store:
        for client in "ab":
            store.observe(ClientJoined(0.0, client, 0, 10, 0))
        for number in range(1, 6):
            for client, gap in (("a", float(number)), ("b", 3.0 * number)):
                values = {"client": client, "gap": gap}
                store.observe(Measured(float(number), number, GAP, values))
            store.observe(Measured(float(number), number, LOAD, {"load": {0: number, 1: 2}}))
            store.observe(Measured(float(number), number, WAIT, {"s": 1.0, "of": 4.0}))
            store.observe(Measured(float(number), number, LINKS, {"sources": {1: (0, number)}}))
        store.observe(RunEnded(6.0, 5, "reached max-updates"))
    with watching(out, "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        show = "document.getElementById('panel-measures').scrollIntoView()"
        parts = "raceme.board.panels.find((one) => one.element.id === 'panel-measures').parts"
        browser.until(lambda: browser.run(f"{show}; return {parts}[1]?.lines?.length") == 2)
        drawn = browser.run(
            f"return {parts}.map(({{lines}}) => (lines ?? []).map((one) => [one.name, one.values]))"
        )
        # Clients a and b at the same times: the maximum and the mean.
        largest, mean = [3.0 * n for n in range(1, 6)], [2.0 * n for n in range(1, 6)]
        assert drawn == [
            [["largest", largest], ["mean", mean]],
            [["cluster 0", [1, 2, 3, 4, 5]], ["cluster 1", [2] * 5]],
            [["s", [0.25] * 5]],
            [],
        ]
        shown = browser.run("return document.getElementById('panel-measures').innerText")
        assert "Links between clusters" in shown
        assert "0, 5" in shown
        if path := os.environ.get("RACEME_SHOTS"):
            browser.resize(1300, 1500)
            browser.driver.save_screenshot(path)


def test_a_method_without_measures_has_no_panel_of_them(browser: Browser, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.observe(ClientJoined(0.0, "a", 0, 10, None))
        store.observe(RunEnded(2.0, 0, "interrupted"))
    hidden = (
        "return ['clients', 'measures']"
        ".map((one) => document.getElementById(`panel-${one}`).hidden)"
    )
    with watching(tmp_path / "run", "127.0.0.1", 0) as beside:
        browser.open(beside.address)
        browser.until(lambda: "The run has ended" in browser.describe())
        browser.until(lambda: browser.run(hidden) == [False, True])


def run_of(
    folder: Path, method: str, accuracy: float, measure: Measure = ACCURACY, **keys: Any
) -> None:
    """Write a finished run of 20 updates."""
    folder.mkdir(parents=True)
    begin(folder, RunConfig.from_mapping({"strategy": method, "dataset": "digits", **keys}))
    with RunStore(folder) as store:
        store.observe(UpdateApplied(1, 1.0, "a", 0, 0, 0, 0.5, 0.5, 1.0, 500_000, 500_000))
        scores = {"a": (0, accuracy / 2, 0.5), "b": (0, accuracy * 1.5, 0.5)}
        store.observe(Evaluated(2.0, 20, accuracy, 0.5, 1, scores, measure=measure))
        store.observe(RunEnded(2.0, 20, "reached max-updates"))
    (folder / "summary.json").write_text("{}")


def test_a_comparison_of_regressions_names_its_error(browser: Browser, tmp_path: Path) -> None:
    for seed, error in ((0, 2.5), (1, 3.5)):
        run_of(tmp_path / "casa" / f"seed-{seed}", "casa", error, Measure("°C"), seed=seed)
    heads = "return [...document.querySelectorAll('h2, thead th')].map((one) => one.innerText)"
    with watching(tmp_path, "127.0.0.1", 0, comparison=True) as beside:
        browser.open(beside.address)
        browser.until(lambda: "2/2 runs finished" in browser.describe())
        found = browser.until(lambda: "MAE (°C)" in browser.run(heads) and browser.run(heads))
    assert "Mean absolute error" in found
    assert found.count("MAE (°C)") == 2
    assert not [head for head in found if "accuracy" in head.lower()]


@pytest.fixture
def index(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    run_of(tmp_path / "first", "casa", 0.5, lr=0.02, seed=7)
    run_of(tmp_path / "second", "casa", 0.75, lr=0.1)
    for seed, accuracy in ((1, 0.5), (2, 0.75)):
        run = tmp_path / "cmp" / "fedasync" / f"seed-{seed}"
        run_of(run, "fedasync", accuracy, lr=0.05, seed=seed)
    command = [sys.executable, "-m", "raceme", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        browser.open(process.stdout.readline().split()[1])
        browser.until(lambda: len(browser.run(NAMES)) == 4)
        yield browser
        browser.driver.get("about:blank")
        process.terminate()


def test_an_index_has_what_differs_and_sorts_by_it(index: Browser) -> None:
    heads = "return [...document.querySelectorAll('#panel-runs thead th')].map((h) => h.innerText)"
    assert "lr" in index.until(lambda: index.run(heads))
    assert "batch-size" not in index.run(heads)
    press = "document.querySelector(`#panel-runs [data-key='${arguments[0]}']`).click()"
    for key, first in (("set lr", "first"), ("set lr", "second"), ("seed", "second")):
        index.run(press, key)
        index.until(lambda first=first: index.run(NAMES)[0] == first)
    index.driver.find_element("css selector", "[data-key=seed]").send_keys("\n")
    index.until(lambda: index.run(NAMES)[0] == "first")
    assert index.run("return document.activeElement.dataset.key") == "seed"
    means = index.run("return document.querySelector('.means tbody').innerText").split("\t")
    assert means == [
        "cmp / fedasync",
        "2",
        "0.625 ± 0.177",
        "0.313 ± 0.088",
        "2.00 ± 0.00 s",
        "1.0 ± 0.0 MB",
    ]


def test_a_note_is_kept_and_a_run_is_deleted(index: Browser, tmp_path: Path) -> None:
    note = index.driver.find_element("css selector", "[aria-label='Note of second']")
    note.send_keys("too large a step\n")
    kept = tmp_path / "second" / "note.txt"
    index.until(lambda: kept.exists() and kept.read_text() == "too large a step\n")
    assert "edit=" not in index.run("return location.href")
    press = "document.querySelector(arguments[0]).click()"
    dialog = "return document.querySelector('dialog')?.innerText ?? ''"
    for answer, names in ((".ask .options button", 4), (".ask .danger", 3)):
        index.run(press, "[aria-label='Delete second']")
        index.until(lambda: "note.txt" in index.run(dialog))
        assert str(tmp_path / "second") in index.run(dialog)
        index.run(press, answer)
        index.until(lambda: index.run(dialog) == "")
        index.until(lambda names=names: len(index.run(NAMES)) == names)
    assert not (tmp_path / "second").exists()
    hidden = "return document.querySelector(\"[aria-label='Delete fedasync, seed 1']\").hidden"
    assert index.run(hidden), "a comparison would miss it"
    # The same page without the secret in the printed address.
    index.run("sessionStorage.clear()")
    index.open(index.run("return location.href"))
    index.until(lambda: len(index.run(NAMES)) == 3)
    assert index.run("return document.querySelector('.written')") is None, "there is no note"
    assert index.run("return document.querySelector('.runs .small').hidden")


def test_a_phone_shows_all_of_an_index(index: Browser) -> None:
    index.resize(390, 844)
    index.until(lambda: index.cut() == [])
    head = "getComputedStyle(document.querySelector('td[data-head=accuracy]'), '::before').content"
    assert index.run(f"return {head}") == '"accuracy"', "values have no heads above them"
