// Lines over an axis, drawn by uPlot, which makes 10,000 points a frame.

import { named, onTheme } from "./colours.js";
import { make, number } from "./words.js";

const FONT = "12px system-ui, sans-serif";

/** A chart of lines. `describe` returns what it shows now; see `draw`. */
export class Chart {
  constructor(label, height) {
    this.element = make("div", { class: "chart", role: "img", "aria-label": label, tabindex: "0" });
    this.legend = make("ul", { class: "legend" });
    this.hidden = new Set();
    this.height = height;
    this.plot = null;
    this.shape = "";
    this.marks = [];
    this.until = null;
    new ResizeObserver(() => this.fit()).observe(this.element);
    onTheme(() => {
      this.shape = "";
      if (this.shown) this.draw(this.shown);
    });
  }

  fit() {
    const width = this.element.clientWidth;
    if (this.plot && width && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.height });
    }
  }

  /**
   * Draw lines.
   *
   * shown.x: ascending numbers. shown.lines: [{ key, name, colour, dash, width, values }].
   * shown.xLabel, shown.yLabel: text. shown.marks: [{ at, name, colour, dash }].
   * shown.until: where the moment is; what is later is veiled.
   */
  draw(shown) {
    this.shown = shown;
    this.marks = shown.marks ?? [];
    this.until = shown.until ?? null;
    const width = this.element.clientWidth;
    if (!width) return;
    const shape = JSON.stringify([
      shown.lines.map(({ key, colour, dash, width: stroke }) => [key, colour, dash, stroke]),
      shown.xLabel,
      shown.yLabel,
    ]);
    const data = [shown.x, ...shown.lines.map((line) => line.values)];
    if (shape !== this.shape) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(shown, width), data, this.element);
      this.fillLegend(shown.lines);
    } else {
      this.plot.setData(data);
    }
  }

  options(shown, width) {
    const [ink, muted, line] = [named("ink"), named("muted"), named("line")];
    const axis = {
      stroke: muted,
      font: FONT,
      labelFont: FONT,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1 },
    };
    const digits = { maximumSignificantDigits: 6 };
    const values = (_, found) => found.map((value) => value?.toLocaleString("en", digits) ?? "");
    return {
      width,
      height: this.height,
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: shown.range }, y: { range: shown.yRange } },
      axes: [
        { ...axis, label: shown.xLabel, labelSize: 18, size: 34, values },
        { ...axis, label: shown.yLabel, labelSize: 18, size: 52, values },
      ],
      series: [
        {},
        ...shown.lines.map((found) => ({
          stroke: found.colour ?? ink,
          width: found.width ?? 1.6,
          dash: found.dash ?? [],
          show: !this.hidden.has(found.key),
          spanGaps: true,
          points: { show: (plot) => plot.data[0].length < 3 },
        })),
      ],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.tell(plot)],
      },
    };
  }

  /** Draw what stands over the lines: a veil over what is still to come, and the marks. */
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const scale = window.devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.at, "x", true);
      ctx.strokeStyle = mark.colour;
      ctx.lineWidth = scale;
      ctx.setLineDash((mark.dash ?? []).map((length) => length * scale));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    if (this.until !== null) {
      const x = plot.valToPos(this.until, "x", true);
      if (x < bbox.left + bbox.width - 1) {
        ctx.globalAlpha = 0.78;
        ctx.fillStyle = named("card");
        ctx.fillRect(x, bbox.top, bbox.left + bbox.width - x, bbox.height);
        ctx.globalAlpha = 1;
        ctx.setLineDash([]);
        ctx.strokeStyle = named("ink");
        ctx.lineWidth = scale;
        ctx.strokeRect(x, bbox.top - 2, 0, bbox.height + 4);
      }
    }
    ctx.restore();
  }

  fillLegend(lines) {
    this.values = new Map();
    this.legend.replaceChildren(
      ...lines.map((line, index) => {
        const value = make("span", { class: "value" });
        this.values.set(index, value);
        const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
        swatch.style.setProperty("--colour", line.colour ?? named("ink"));
        swatch.classList.toggle("dashed", Boolean(line.dash?.length));
        const button = make(
          "button",
          { type: "button", "aria-pressed": String(!this.hidden.has(line.key)) },
          swatch,
          make("bdi", {}, line.name),
          value,
        );
        button.addEventListener("click", () => {
          const shows = this.hidden.delete(line.key) || (this.hidden.add(line.key), false);
          button.setAttribute("aria-pressed", String(shows));
          this.plot.setSeries(index + 1, { show: shows });
        });
        return make("li", {}, button);
      }),
    );
  }

  /** Say in the legend what the lines are where the mouse is. */
  tell(plot) {
    const index = plot.cursor.idx;
    for (const [line, element] of this.values ?? []) {
      const value = index === null || index === undefined ? null : plot.data[line + 1][index];
      element.textContent = value === null || value === undefined ? "" : number(value, 3);
    }
  }
}
