// Lines over an axis, drawn by uPlot, which makes 10,000 points a frame.

import { FONT, save, savePicture } from "./canvas.js";
import { named, onTheme } from "./colours.js";
import { make, number } from "./words.js";

const STEP = 1.5; // How far one press zooms.
const SCALES = { linear: "linear", x: "log x", y: "log y" };

/** A chart of lines with its tools and legend. `draw` says what it shows. */
export class Chart {
  constructor(label, height, smooths = true) {
    this.label = label;
    this.smooths = smooths;
    this.element = make("div", { class: "chart", role: "img", "aria-label": label, tabindex: "0",
      onkeydown: (event) => this.press(event) });
    this.legend = make("ul", { class: "legend" });
    this.hidden = new Set();
    this.height = height;
    this.plot = null;
    this.shape = "";
    this.marks = [];
    this.until = null;
    this.zoom = null;
    this.smoothing = 0;
    this.scale = "linear";
    this.tools = this.makeTools();
    new ResizeObserver(() => this.fit()).observe(this.element);
    onTheme(() => this.again());
  }

  /** What a panel shows of it. */
  get parts() {
    return [this.tools, this.element, this.legend];
  }

  makeTools() {
    const smooth = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0,
      "aria-label": "Smoothing", oninput: () => {
        this.smoothing = Number(smooth.value);
        this.again();
      } });
    const scale = make("select", { "aria-label": "Scale", onchange: () => {
      this.scale = scale.value;
      this.zoom = null;
      this.again();
    } }, ...Object.entries(SCALES).map(([key, text]) => make("option", { value: key }, text)));
    const button = (text, title, onclick) =>
      make("button", { type: "button", title, "aria-label": title, onclick }, text);
    this.reset = button("Reset zoom", "Show all (0)", () => this.zoomTo(null));
    this.reset.hidden = true;
    this.where = make("output", { class: "where" });
    return make("div", { class: "options tools" },
      ...(this.smooths ? [make("label", {}, "smoothing ", smooth)] : []), scale,
      button("−", "Zoom out (−)", () => this.zoomBy(STEP)),
      button("+", "Zoom in (+); or drag. Shift and drag, or ← →, move", () => this.zoomBy(1 / STEP)),
      this.reset,
      button("CSV", "Save the lines as CSV", () => save(csvOf(this.shown), `${this.label}.csv`)),
      button("PNG", "Save the chart as PNG", () => savePicture(this.plot.ctx.canvas, this.label,
        this.shown.lines.filter(({ key }) => !this.hidden.has(key)))), this.where);
  }

  fit() {
    const width = this.element.clientWidth;
    if (this.plot && width && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.height });
    }
  }

  again() {
    this.shape = "";
    if (this.shown) this.draw(this.shown);
  }

  /**
   * Draw lines.
   *
   * shown.x: ascending numbers. shown.lines: [{ key, name, colour, dash, width, values, band, bars }];
   * a band is [lower values, upper values]; lines of one name share an entry of the legend. shown.xLabel, shown.yLabel: text.
   * shown.marks: [{ at, name, colour, dash }]. shown.until: where the moment is; what is later is
   * veiled.
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
    const data = this.dataOf(shown);
    if (shape !== this.shape) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(shown, width), data, this.element);
      this.fillLegend(shown.lines);
    } else {
      this.plot.setData(data);
    }
  }

  /** Return what uPlot draws: the lines, smoothed, then the edges of the bands. */
  dataOf({ x, lines }) {
    const bands = lines.flatMap(({ band }) => band ?? []);
    const columns = [...lines.map(({ values }) => values), ...bands].map((values) => {
      const found = this.smoothing ? smoothed(values, this.smoothing) : values;
      return this.scale === "y" ? found.map((value) => (value > 0 ? value : null)) : found;
    });
    const first = this.scale === "x" ? Math.max(0, x.findIndex((value) => value > 0)) : 0;
    return first ? [x, ...columns].map((column) => column.slice(first)) : [x, ...columns];
  }

  /** Show a stretch of the axis, [from, to], or all of it. */
  zoomTo(range) {
    this.zoom = range;
    this.reset.hidden = !range;
    this.plot?.setData(this.plot.data);
  }

  zoomBy(factor, shift = 0) {
    const { min, max } = this.plot.scales.x;
    const half = ((max - min) / 2) * factor;
    const middle = (min + max) / 2 + shift * (max - min);
    this.zoomTo([middle - half, middle + half]);
  }

  press(event) {
    const call = {
      "+": () => this.zoomBy(1 / STEP), "-": () => this.zoomBy(STEP), 0: () => this.zoomTo(null),
      ArrowLeft: () => this.zoomBy(1, -0.2), ArrowRight: () => this.zoomBy(1, 0.2),
    }[event.key];
    if (!call || !this.plot || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    call();
  }

  /** Have Shift and a drag, or a finger once it is zoomed, move what is shown. */
  bindPan(plot) {
    let held = null;
    plot.over.addEventListener("pointerdown", (event) => {
      if (!event.shiftKey && !(event.pointerType === "touch" && this.zoom)) return;
      held = [event.clientX, plot.scales.x.min, plot.scales.x.max];
      plot.over.setPointerCapture(event.pointerId);
    });
    plot.over.addEventListener("pointermove", (event) => {
      if (!held) return;
      const [from, min, max] = held;
      const by = ((from - event.clientX) / plot.over.clientWidth) * (max - min);
      this.zoomTo([min + by, max + by]);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      plot.over.addEventListener(name, () => (held = null));
    }
  }

  xRange(shown, low, high) {
    if (this.scale === "x") {
      const [from, to] = this.zoom ?? [low, high];
      return [Math.max(from, low), Math.max(to, low * 1.01)];
    }
    return this.zoom ?? shown.range?.() ?? (low === high ? [low - 1, high + 1] : [low, high]);
  }

  yRange(shown, low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (this.scale === "y") return uPlot.rangeLog(low, high, 10, true);
    if (this.zoom || !shown.yRange) return uPlot.rangeNum(low, high, 0.1, true);
    return shown.yRange(null, low, high);
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
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: false },
        bind: {
          mousedown: (_, __, handle) => (event) => (event.shiftKey ? null : handle(event)),
          dblclick: () => () => this.zoomTo(null),
        },
      },
      scales: {
        x: { time: false, distr: this.scale === "x" ? 3 : 1,
          range: (_, low, high) => this.xRange(this.shown, low, high) },
        y: { distr: this.scale === "y" ? 3 : 1,
          range: (_, low, high) => this.yRange(this.shown, low, high) },
      },
      bands: bandsOf(shown.lines),
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
          ...(found.bars ? { paths: uPlot.paths.bars({ size: [0.85] }), fill: found.colour } : {}),
          points: { show: (plot) => !found.bars && plot.data[0].length < 3 },
        })),
        ...shown.lines.flatMap((found) => (found.band ?? []).map(() =>
          ({ width: 0, spanGaps: true, points: { show: false }, show: !this.hidden.has(found.key) }))),
      ],
      hooks: {
        ready: [(plot) => this.bindPan(plot)],
        setSelect: [(plot) => {
          const { left, width: wide } = plot.select;
          if (wide < 3) return;
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
        }],
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
    const names = new Map(lines.map((line) => [line.name, []]));
    for (const line of lines) names.get(line.name).push(line);
    this.legend.replaceChildren(...[...names].map(([name, found]) => {
      const [{ colour, dash }] = found;
      const value = make("span", { class: "value" });
      if (found.length === 1) this.values.set(lines.indexOf(found[0]), value);
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.setProperty("--colour", colour ?? named("ink"));
      swatch.classList.toggle("dashed", Boolean(dash?.length));
      const button = make("button", { type: "button",
        "aria-pressed": String(!this.hidden.has(found[0].key)),
        onclick: () => {
          const shows = this.hidden.has(found[0].key);
          for (const { key } of found) this.hidden[shows ? "delete" : "add"](key);
          button.setAttribute("aria-pressed", String(shows));
          this.again();
        } }, swatch, make("bdi", {}, name), value);
      return make("li", {}, button);
    }));
  }

  /** Say in the legend what the lines are where the mouse is. */
  tell(plot) {
    const index = plot.cursor.idx;
    const x = plot.data[0][index ?? -1];
    this.where.textContent = x === undefined ? "" :
      `${this.shown.xLabel}: ${x.toLocaleString("en", { maximumSignificantDigits: 6 })}`;
    for (const [line, element] of this.values ?? []) {
      const value = plot.data[line + 1][index ?? -1];
      element.textContent = value === null || value === undefined ? "" : number(value, 3);
    }
  }
}

/** Return bands of uPlot between the edges, which come behind all lines. */
function bandsOf(lines) {
  let at = lines.length + 1;
  return lines.filter(({ band }) => band).map(({ colour }) => {
    at += 2;
    return { series: [at - 1, at - 2], fill: `${colour}33` };
  });
}

/** Return an exponential moving average, without a pull to its start (as TensorBoard's). */
function smoothed(values, weight) {
  let [sum, count] = [0, 0];
  return Array.from(values, (value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    count += 1;
    return sum / (1 - weight ** count);
  });
}

function csvOf({ x, xLabel, lines }) {
  // A spreadsheet would take a name that begins so for a formula.
  const cell = (text) => `"${String(text).replace(/^[=+@-]/, "'$&").replaceAll('"', '""')}"`;
  const rows = Array.from(x, (value, row) =>
    [value, ...lines.map(({ values }) => values[row] ?? "")].join(","));
  const head = [xLabel, ...lines.map(({ name }) => name)].map(cell).join(",");
  return new Blob([[head, ...rows, ""].join("\n")], { type: "text/csv" });
}
