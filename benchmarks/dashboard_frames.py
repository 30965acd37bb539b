"""What a frame of the page costs with 10,000 clients and 20,000 updates, in Chromium without a GPU.

    python benchmarks/dashboard_frames.py

Milliseconds of processor time of the page's thread per frame, which other work on the machine does
not change much; 60 frames per second leave 16.7. Each line is the median, and the worst, of as many
turns as are asked for, of 40 frames each.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from selenium import webdriver

from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    Evaluated,
    RunEnded,
    UpdateApplied,
)
from raceme.features.client_map.positions import PositionsFile
from raceme.records.store import RunStore
from raceme.reporting.dashboard.server import watching

FRAMES = 40
DRIVE = """
const [frames, done] = arguments;
let frame = 0;
const next = () => {
  if (frame === frames) { done(); return; }
  (%s)(frame);
  frame += 1;
  requestAnimationFrame(next);
};
requestAnimationFrame(next);
"""
TABLE = "document.getElementById('panel-clients').scrollIntoView({ block: 'center' });"
TABLE, MAP = (
    f"document.getElementById('panel-{name}').scrollIntoView({{ block: 'center' }});"
    for name in ("clients", "map")
)
TOP, BOTTOM = "scrollTo(0, 0);", "scrollTo(0, document.body.scrollHeight);"
ROWS = "() => { document.querySelector('.tall').scrollTop += %d; }"
MOMENT = "(i) => raceme.board.clock.show(raceme.run.end * (i + 1) / 45)"
MEASURED = {
    "a table of 10,000 clients, scrolled by 170 pixels": (TABLE, ROWS % 170),
    "a table of 10,000 clients, scrolled by 5,000 pixels": (TABLE, ROWS % 5000),
    "the page, scrolled by 60 pixels": (TOP, "(i) => scrollTo(0, 60 * i)"),
    "another moment, top of the page": (TOP, MOMENT),
    "another moment, map and devices": (MAP, MOMENT),
    "another moment, bottom of the page": (BOTTOM, MOMENT),
}
"""JavaScript of each case: the preparation, and the work of each frame."""


def make_run(folder: Path, clients: int, updates: int) -> None:
    """Write the files of a large run: four clusters after two splits, ten evaluations."""
    rng = np.random.default_rng(0)
    names = [f"client-{number}" for number in range(clients)]
    speed = rng.lognormal(0.0, 0.6, clients)
    positions = PositionsFile(folder)
    with RunStore(folder) as store:
        for number, name in enumerate(names):
            store.observe(ClientJoined(0.0, name, 0, 100, number % 4))
        at = ClusterChange.ASSIGN
        store.observe(ClustersChanged(0.0, 0, at, {n: {0: 1.0} for n in names}, (), (0,)))
        for seq in range(1, updates + 1):
            now, who = seq / 100.0, int(rng.integers(clients))
            if seq % 100 == 0:
                store.observe(ClientLeft(now, names[int(rng.integers(clients))]))
            cluster = 0 if seq < updates // 3 else who % 4 + 1
            store.observe(
                UpdateApplied(
                    *(seq, now, names[who], cluster, seq, int(rng.poisson(30)), 0.5),
                    *(max(0.0, now - speed[who]), float(rng.random()), 8, 8),
                )
            )
            if seq == updates // 3:
                halves = {name: {number % 4 + 1: 1.0} for number, name in enumerate(names)}
                kind, made = ClusterChange.SPLIT, (1, 2, 3, 4)
                store.observe(ClustersChanged(now, seq, kind, halves, (0,), made))
            if seq % (updates // 10) == 0:
                scores = rng.random(clients)
                served = [0 if seq < updates // 3 else n % 4 + 1 for n in range(clients)]
                told = zip(names, served, scores, strict=True)
                every = {name: (k, float(a), 0.5) for name, k, a in told}
                store.observe(Evaluated(now, seq, float(scores.mean()), 0.5, 4, every, clients))
                centres = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]])
                spread = rng.normal(size=(clients, 2)) * 0.3
                positions.write(now, names, centres[np.arange(clients) % 4] + spread)
        store.observe(RunEnded(updates / 100.0, updates, f"{updates} updates were applied"))


def milliseconds(driver: Any, name: str) -> float:
    """Return the processor time of a frame in milliseconds."""
    begin, step = MEASURED[name]
    driver.execute_script(begin)
    time.sleep(0.5)
    before = spent(driver)
    driver.execute_async_script(DRIVE % step, FRAMES)
    return 1000 * (spent(driver) - before) / FRAMES


def spent(driver: Any) -> float:
    """Return the seconds that the page's thread has computed so far."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(120)
    driver.set_window_size(1300, 900)
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder), given.clients, given.updates)
        with watching(Path(folder), "127.0.0.1", 0) as beside:
            try:
                driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
                driver.get(beside.address)
                ready = "return Boolean(window.raceme?.run.isOver)"
                while not driver.execute_script(ready):
                    time.sleep(0.2)
                time.sleep(2)
                for name in MEASURED:
                    found = [milliseconds(driver, name) for _ in range(given.turns)]
                    print(f"{name}: {statistics.median(found):.1f} ms (worst {max(found):.1f})")
            finally:
                driver.quit()


if __name__ == "__main__":
    main()
