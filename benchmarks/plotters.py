"""Frames per second of plotting libraries: a line of 10,000 points, redrawn for each frame.

    npm pack uplot echarts plotly.js-dist-min      # and unpack them
    python benchmarks/plotters.py uplot=uPlot.iife.min.js plotly=plotly.min.js

In Chromium without a window, which draws without a GPU.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

from selenium import webdriver

BEGIN = {
    "uplot": """const u = new uPlot({ width: 1000, height: 400, scales: { x: { time: false } },
        series: [{}, { stroke: "red" }] }, points(0), place);
        window.step = (i) => u.setData(points(i));""",
    "echarts": """const pairs = (i) => {
          const [x, y] = points(i);
          return x.map((v, k) => [v, y[k]]);
        };
        const c = echarts.init(place);
        c.setOption({ animation: false, xAxis: { type: "value" }, yAxis: { type: "value" },
        series: [{ type: "line", showSymbol: false, data: pairs(0) }] });
        window.step = (i) => {
          c.setOption({ series: [{ data: pairs(i) }] });
          c.getZr().flush();
        };""",
    "plotly": """const traces = (i) => {
          const [x, y] = points(i);
          return [{ x, y, mode: "lines" }];
        };
        Plotly.newPlot(place, traces(0), {}, { staticPlot: true });
        window.step = (i) => Plotly.react(place, traces(i));""",
}
MEASURE = """
const done = arguments[0];
document.body.innerHTML = '<div style="width: 1000px; height: 400px"></div>';
const place = document.body.firstChild;
const points = (i) => {
  const x = Array.from({ length: 10000 }, (_, k) => k);
  return [x, x.map((k) => Math.sin((k + i * 50) / 500) + Math.random() * 0.2)];
};
%s
const took = [];
let [i, begun] = [0, 0];
const frame = async () => {
  if (i === 5) begun = performance.now();
  if (i === 65) {
    took.sort((a, b) => a - b);
    done([60000 / (performance.now() - begun), took[30]]);
    return;
  }
  const before = performance.now();
  await step(i++);
  if (i > 5) took.push(performance.now() - before);
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


def main() -> None:
    """Measure the libraries whose files are named."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(120)
    try:
        for given in sys.argv[1:]:
            name, _, path = given.partition("=")
            content = Path(path).read_bytes()
            driver.get("about:blank")
            # Names that a script declares are not global in the page unless they are exported.
            expose = "window.uPlot = typeof uPlot === 'undefined' ? null : uPlot;"
            driver.execute_script(f"{content.decode()};{expose}")
            rate, script = driver.execute_async_script(MEASURE % BEGIN[name])
            print(
                f"{name}: {len(content):,} bytes, {len(gzip.compress(content)):,} compressed, "
                f"{rate:.1f} frames/s, {script:.1f} ms of script per frame"
            )
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
