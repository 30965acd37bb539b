// The page of a comparison: all methods' curves side by side, and a table that fills in.

import { Chart } from "./chart.js";
import { onTheme, seriesLook } from "./colours.js";
import { panel } from "./panel.js";
import { make, number, refill, timeUnit } from "./words.js";

const MOST_LINES = 40;

export class ComparisonBoard {
  constructor(run, links = true) {
    this.links = links;
    this.run = run;
    this.runs = new Map();
    this.axis = "time";
    this.chart = new Chart("Accuracy of all runs", 380);
    this.choice = make("select", { "aria-label": "Axis of the chart", onchange: () => {
      this.axis = this.choice.value;
      this.changed();
    } }, make("option", { value: "time" }, "virtual time"),
    make("option", { value: "updates" }, "updates"));
    this.cases = make("select", { "aria-label": "Case", onchange: () => {
      this.chosen = this.cases.value;
      this.changed();
    } });
    this.casesLabel = make("label", { hidden: true }, "case ", this.cases);
    this.body = make("tbody", {});
    const heads = ["run", "state", "updates", "accuracy", "best", "worst tenth", "clusters", "time"];
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region",
      "aria-label": "Runs" }, make("table", { class: "runs" },
      make("thead", {}, make("tr", {}, ...heads.map((text, index) =>
        make("th", { scope: "col", class: index < 2 ? "word" : "" }, text)))), this.body));
    this.element = make("div", { class: "board" }, make("div", { class: "panels" },
      panel("curves", "Accuracy", "wide",
        make("div", { class: "options" }, this.casesLabel,
          make("label", {}, "over ", this.choice)),
        ...this.chart.parts),
      panel("runs", "Runs", "wide", this.table)));
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
    this.runs = new Map([...this.runs].sort(([one], [other]) => (one < other ? -1 : 1)));
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
    const failed = count("failed") ? `, ${count("failed")} failed` : "";
    return `${count("finished")} of ${runs.length} runs so far are finished${failed}.`;
  }

  changed() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  /** Return the runs of the case that is chosen; until one is, of that which is at work. */
  ofCase() {
    const cases = [...new Set([...this.runs.values()].map((one) => one.case))];
    const working = [...this.runs.values()].filter(({ state }) => state === "running");
    const chosen = cases.includes(this.chosen) ? this.chosen : working[0]?.case ?? cases[0];
    this.casesLabel.hidden = cases.length < 2;
    refill(this.cases, ...cases.map((name) => make("option", { value: name }, name)));
    this.cases.value = chosen;
    return [...this.runs].filter(([, one]) => one.case === chosen);
  }

  draw() {
    const runs = this.ofCase();
    const shown = runs.filter(([, { points }]) => points.time?.length);
    const methods = [...new Set(runs.map(([, { method }]) => method))];
    const end = Math.max(1e-9, ...shown.map(([, { points }]) => points.time.at(-1)));
    const [seconds, unit] = timeUnit(end);
    const at = ({ points }) =>
      this.axis === "updates" ? points.updates : points.time.map((time) => time / seconds);
    const x = [...new Set(shown.flatMap(([, one]) => at(one)))].sort((one, other) => one - other);
    const place = new Map(x.map((value, index) => [value, index]));
    const lines = shown.slice(0, MOST_LINES).map(([name, one]) => {
      const values = new Array(x.length).fill(undefined);
      at(one).forEach((value, index) => {
        values[place.get(value)] = one.points.accuracy[index] ?? undefined;
      });
      const { colour, dash } = seriesLook(methods.indexOf(one.method));
      return { key: name, name: one.label, colour, dash, width: one.first ? 2.4 : 1, values };
    });
    this.chart.draw({
      x: x.length ? x : [0, 1],
      lines: lines.length ? lines : [{ key: "", name: "nothing yet", values: [undefined, undefined] }],
      xLabel: this.axis === "updates" ? "updates" : `virtual time (${unit})`,
      yLabel: this.run.measure.label,
      yRange: (_, low, high) => (this.run.measure.isError ? [0, (high ?? 1) * 1.05] : [0, 1]),
    });
    this.fill(runs, methods);
  }

  fill(runs, methods) {
    refill(this.body, ...runs.map(([name, one]) => {
      const { points } = one;
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      dot.style.setProperty("--colour", seriesLook(methods.indexOf(one.method)).colour);
      const label = make("bdi", {}, one.label);
      const link = this.links
        ? make("a", { href: `?run=${encodeURIComponent(name)}` }, label)
        : label;
      const bar = make("progress", { max: one.planned || 1, value: one.updates ?? 0,
        "aria-label": "updates" });
      const last = (column, digits) => number(points[column]?.at(-1), digits);
      return make("tr", {},
        make("th", { scope: "row", class: "word" }, dot, link),
        make("td", { class: "word" }, one.state),
        make("td", {}, bar, ` ${number(one.updates ?? 0)}`),
        make("td", {}, last("accuracy", 3)),
        make("td", {}, number(one.best, 3)),
        make("td", {}, last("worst", 3)),
        make("td", {}, number(one.clusters)),
        make("td", {}, points.time?.length ? `${number(points.time.at(-1), 1)} s` : "–"));
    }));
  }
}
