// The page of a comparison: all methods' curves side by side, and a table that fills in.

import { scoreRange } from "./axis.js";
import { Chart } from "./chart.js";
import { onTheme, seriesLook } from "./colours.js";
import { panel } from "./panel.js";
import { make, number, plural, refill, timeText, timeUnit } from "./words.js";

const MOST_LINES = 40;
const MOST_FIRST = 12; // Of an index this many runs are drawn until others are selected.
const HEADS = [
  "run", "state", "updates", "accuracy", "best", "worst tenth", "clusters", "time", "started",
];

export class ComparisonBoard {
  constructor(run, links = true) {
    this.links = links;
    this.run = run;
    this.runs = new Map();
    this.rows = new Map();
    this.chosen = new Map(); // Name of a run to whether it is drawn, where a person said so.
    this.axis = "time";
    this.chart = new Chart("Accuracy of the runs", 380);
    const choice = (label, options, onchange) => make("select", { "aria-label": label,
      onchange: ({ target }) => {
        onchange(target.value);
        this.changed();
      } }, ...Object.entries(options).map(([value, text]) => make("option", { value }, text)));
    this.drawing = choice("Lines", { runs: "each run", mean: "mean ± std" },
      (value) => (this.wanted = value));
    this.cases = choice("Case", {}, (value) => (this.case = value));
    this.casesLabel = make("label", { hidden: true }, "case ", this.cases);
    this.search = make("input", { type: "search", placeholder: "Filter runs",
      "aria-label": "Filter runs", oninput: () => this.changed() });
    const all = (drawn) => () => {
      for (const [name] of this.listed()) this.chosen.set(name, drawn);
      this.changed();
    };
    this.body = make("tbody", {});
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region",
      "aria-label": "Runs" }, make("table", { class: "runs" },
      make("thead", {}, make("tr", {}, ...HEADS.map((text, index) =>
        make("th", { scope: "col", class: index < 2 ? "word" : "" }, text)))), this.body));
    this.element = make("div", { class: "board" }, make("div", { class: "panels" },
      panel("curves", "Accuracy", "wide",
        make("div", { class: "options" }, this.casesLabel,
          make("label", {}, "show ", this.drawing),
          make("label", {}, "over ", choice("Axis of the chart",
            { time: "time", updates: "updates" }, (value) => (this.axis = value)))),
        ...this.chart.parts),
      panel("runs", "Runs", "wide", make("div", { class: "options" }, this.search,
        make("button", { type: "button", onclick: all(true) }, "Select all"),
        make("button", { type: "button", onclick: all(false) }, "Select none")), this.table)));
    onTheme(() => this.changed());
    this.planned = false;
  }

  /** Take what is new of some runs: { name: { state, planned, points: {…}, … } }. */
  add(found) {
    for (const [name, told] of Object.entries(found)) {
      const held = this.runs.get(name) ?? { points: {} };
      const { points, ...rest } = told;
      if (told.anew) held.points = {};
      Object.assign(held, rest);
      for (const [column, values] of Object.entries(points ?? {})) {
        (held.points[column] ??= []).push(...values);
      }
      this.runs.set(name, held);
    }
    // An index has the newest first, a comparison has its methods in order.
    const isIndex = [...this.runs.values()].some(({ single }) => single);
    this.runs = new Map([...this.runs].sort(([one, { started }], [other, { started: at }]) =>
      (isIndex && at - started) || (one < other ? -1 : 1)));
  }

  get isOver() {
    const runs = [...this.runs.values()];
    return runs.length > 0 && runs.every(({ state }) => state !== "running");
  }

  /** How far the comparison is, in words. */
  get said() {
    const runs = [...this.runs.values()];
    if (!runs.length) return "Waiting for the first run.";
    const count = (state) => runs.filter((one) => one.state === state).length;
    const lost = ["failed", "stopped"].filter(count).map((state) => `, ${count(state)} ${state}`);
    return `${count("finished")}/${runs.length} runs finished${lost.join("")}.`;
  }

  changed() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  /** Return the runs of the chosen case: of several until one is, all or that which is running. */
  ofCase() {
    const runs = [...this.runs];
    const cases = [...new Set(runs.map(([, one]) => one.case))];
    const isIndex = runs.some(([, { single }]) => single);
    const names = isIndex && cases.length > 1 ? ["all", ...cases] : cases;
    const running = runs.find(([, { state }]) => state === "running");
    const first = isIndex ? names[0] : running?.[1].case ?? cases[0];
    const chosen = names.includes(this.case) ? this.case : first;
    this.casesLabel.hidden = names.length < 2;
    refill(this.cases, ...names.map((value) => make("option", { value }, value || "single runs")));
    this.cases.value = chosen;
    return runs.filter(([, one]) => one.case === chosen || (isIndex && chosen === "all"));
  }

  /** Return the runs of the case whose names have the words of the filter. */
  listed() {
    const words = this.search.value.toLowerCase().split(/\s+/);
    return this.ofCase().filter(([name, { label, method, state }]) => {
      const text = `${name} ${label} ${method} ${state}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  draw() {
    const listed = this.listed();
    this.means = (this.wanted ?? this.fitting(listed)) === "mean";
    this.drawing.value = this.means ? "mean" : "runs";
    const methods = [...new Set(this.ofCase().map(([, { method }]) => method))].sort();
    this.look = ({ method }) => seriesLook(methods.indexOf(method));
    const isIndex = listed.some(([, { single }]) => single);
    listed.forEach(([name, one], index) => {
      one.isDrawn = this.chosen.get(name) ?? (!isIndex || index < MOST_FIRST);
    });
    const shown = listed.filter(([, one]) => one.isDrawn && one.points.time?.length)
      .slice(0, MOST_LINES);
    const end = Math.max(1e-9, ...shown.map(([, { points }]) => points.time.at(-1)));
    const [seconds, unit] = timeUnit(end);
    const at = ({ points }) =>
      this.axis === "updates" ? points.updates : points.time.map((time) => time / seconds);
    const x = [...new Set(shown.flatMap(([, one]) => at(one)))].sort((one, other) => one - other);
    const lines = this.means ? this.meansOf(shown, x, at) : this.linesOf(shown, x, at);
    this.chart.draw({
      x: x.length ? x : [0, 1],
      lines: lines.length ? lines : [{ key: "", name: "nothing yet", values: [undefined, undefined] }],
      xLabel: this.axis === "updates" ? "updates" : `time of the run (${unit})`,
      yLabel: this.run.measure.label,
      yRange: scoreRange(this.run.measure),
    });
    this.fill(listed);
  }

  /** Return what to draw until a person chooses: means of methods, but for runs that differ. */
  fitting(listed) {
    const methods = new Set(listed.map(([, { method }]) => method));
    const isIndex = listed.some(([, { single }]) => single);
    return methods.size < listed.length && !isIndex ? "mean" : "runs";
  }

  /** Return the name of a run, with its comparison unless that is the chosen case. */
  nameOf({ case: of, label }) {
    return of && of !== this.cases.value ? `${of} / ${label}` : label;
  }

  linesOf(shown, x, at) {
    const place = new Map(x.map((value, index) => [value, index]));
    return shown.map(([name, one]) => {
      const values = new Array(x.length).fill(undefined);
      at(one).forEach((value, index) => {
        values[place.get(value)] = one.points.accuracy[index] ?? undefined;
      });
      // Seeds of a method are one entry of the legend.
      return { key: name, name: one.method, ...this.look(one), width: 1.4, values };
    });
  }

  /** Return for each method the mean of its runs, and one standard deviation to either side. */
  meansOf(shown, x, at) {
    const several = new Set(shown.map(([, { dataset }]) => dataset)).size > 1;
    const groups = new Map();
    for (const [, one] of shown) {
      const key = several ? `${one.method} on ${one.dataset}` : one.method;
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    return [...groups].map(([method, runs]) => {
      const curves = runs.map((one) => resampled(at(one), one.points.accuracy, x));
      const found = x.map((_, index) => meanAndDeviation(curves.map((curve) => curve[index])));
      const edge = (sign) => found.map((one) => one && one[0] + sign * one[1]);
      return { key: method, name: `${method} (${plural(runs.length, "run")})`,
        ...this.look(runs[0]), width: 2.2, values: found.map((one) => one && one[0]),
        band: [edge(-1), edge(1)] };
    });
  }

  fill(listed) {
    const rows = listed.map(([name, one]) => {
      if (!this.rows.has(name)) this.rows.set(name, this.rowOf(name));
      const { element, box, dot, label, cells, bar } = this.rows.get(name);
      box.checked = one.isDrawn;
      box.setAttribute("aria-label", `Draw ${one.label}`);
      dot.style.setProperty("--colour", this.look(one).colour);
      label.textContent = this.nameOf(one);
      bar.max = one.planned || 1;
      bar.value = one.updates ?? 0;
      const last = (column) => number(one.points[column]?.at(-1), 3);
      const end = one.points.time?.at(-1);
      [one.state, number(one.updates ?? 0), last("accuracy"), number(one.best, 3), last("worst"),
        number(one.clusters), end === undefined ? "–" : timeText(end, end),
        one.started ? new Date(1000 * one.started).toLocaleString([], STARTED) : "–",
      ].forEach((text, index) => (cells[index].textContent = text));
      return element;
    });
    const held = this.body.children;
    if (rows.length !== held.length || rows.some((row, index) => row !== held[index])) {
      this.body.replaceChildren(...rows);
    }
  }

  /** Make the row of a run: what is in it changes, and it keeps the focus. */
  rowOf(name) {
    const box = make("input", { type: "checkbox", onchange: () => {
      this.chosen.set(name, box.checked);
      this.changed();
    } });
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    const label = make("bdi", {});
    const link = this.links ? make("a", { href: `?run=${encodeURIComponent(name)}` }, label) : label;
    const bar = make("progress", { max: 1, value: 0, "aria-label": "updates" });
    const cells = HEADS.slice(1).map(() => make("span", {}));
    const element = make("tr", {},
      make("th", { scope: "row", class: "word" }, box, " ", dot, link),
      ...cells.map((cell, index) => make("td", { class: index ? "" : "word" },
        ...(index === 1 ? [bar, " "] : []), cell)));
    return { element, box, dot, label, bar, cells };
  }
}

const STARTED = { dateStyle: "medium", timeStyle: "short" };

/** Return values at other places of the axis, between two known ones in proportion. */
function resampled(at, values, x) {
  let row = 0;
  return x.map((place) => {
    while (row < at.length - 1 && at[row + 1] <= place) row += 1;
    if (place < at[0] || place > at.at(-1)) return null;
    if (at[row] === place || row === at.length - 1) return values[row];
    const [one, other] = [values[row], values[row + 1]];
    if (one === null || other === null) return null;
    return one + ((other - one) * (place - at[row])) / (at[row + 1] - at[row]);
  });
}

/** Return mean and standard deviation (n − 1) of values; null unless all are known. */
function meanAndDeviation(values) {
  if (values.some((value) => value === null || value === undefined)) return null;
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const square = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return [mean, Math.sqrt(square / Math.max(1, values.length - 1))];
}
