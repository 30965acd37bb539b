// The page of a comparison: all methods' curves side by side, and a table that fills in.

import { scoreRange } from "./axis.js";
import { Chart } from "./chart.js";
import { onTheme, seriesLook } from "./colours.js";
import { panel } from "./panel.js";
import { SCORE } from "./run.js";
import { make, number, plural, refill, timeText, timeUnit } from "./words.js";

const MOST_LINES = 40;
const MOST_FIRST = 12; // Of an index this many runs are drawn until others are selected.
// What the table says of each run; settings that differ between runs come before the updates.
const COLUMNS = [
  { key: "label", head: "run", word: true },
  { key: "note", head: "note", word: true },
  { key: "state", head: "state", word: true },
  { key: "strategy", head: "strategy", word: true, ofIndex: true },
  { key: "dataset", head: "dataset", word: true, ofIndex: true },
  { key: "seed", head: "seed", ofIndex: true, text: ({ seed }) => number(seed) },
  { key: "updates", head: "updates", text: ({ updates }) => number(updates ?? 0) },
  ...["accuracy", "best", "worst"].map((key) => ({ key, head: key === "worst" ? "worst tenth" : key,
    value: (one) => (key === "best" ? one.best : last(one, key)), text: (one, value) => number(value, 3) })),
  { key: "clusters", head: "clusters", text: ({ clusters }) => number(clusters) },
  { key: "time", head: "time", value: (one) => last(one, "time"),
    text: (one, value) => (value === undefined ? "–" : timeText(value, value)) },
  { key: "started", head: "started", text: ({ started }) =>
    (started ? new Date(1000 * started).toLocaleString([], STARTED) : "–") },
];
const MEANS = [["accuracy", "accuracy"], ["worst", "worst tenth"], ["time", "time"], ["bytes", "bytes"]];

export class ComparisonBoard {
  constructor(run, links = true) {
    this.links = links;
    this.run = run;
    this.runs = new Map();
    this.rows = new Map();
    this.chosen = new Map(); // Name of a run to whether it is drawn, where a person said so.
    this.axis = "time";
    this.chart = new Chart("Scores of the runs", 380);
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
    this.by = null; // The column that sorts the table, until then in the runs' own order.
    this.heads = make("tr", { role: "row" });
    this.headCells = new Map();
    this.body = make("tbody", { role: "rowgroup" });
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region",
      "aria-label": "Runs" }, make("table", { class: "runs cards", role: "table" },
      make("thead", { role: "rowgroup" }, this.heads), this.body));
    this.meanRows = make("tbody", { role: "rowgroup" });
    this.meansPanel = panel("means", "Means", "wide", make("div", { class: "scroll", tabindex: "0",
      role: "region", "aria-label": "Means" }, make("table", { class: "runs cards means", role: "table" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" },
        ...(this.meanHeads = ["method", "runs", ...MEANS.map(([, head]) => head)].map((text, index) =>
          make("th", { scope: "col", role: "columnheader", class: index ? "" : "word" }, text))))),
      this.meanRows)));
    this.meansPanel.hidden = true;
    this.trouble = make("p", { class: "alarm", role: "alert", hidden: true });
    this.element = make("div", { class: "board" }, make("div", { class: "panels" },
      this.curves = panel("curves", "Score", "wide",
        make("div", { class: "options" }, this.casesLabel,
          make("label", {}, "show ", this.drawing),
          make("label", {}, "over ", choice("Axis of the chart",
            { time: "time", updates: "updates" }, (value) => (this.axis = value)))),
        ...this.chart.parts),
      this.meansPanel,
      panel("runs", "Runs", "wide", make("div", { class: "options" }, this.search,
        make("button", { type: "button", onclick: all(true) }, "Select all"),
        make("button", { type: "button", onclick: all(false) }, "Select none")), this.trouble,
        this.table)));
    onTheme(() => this.changed());
    this.planned = false;
  }

  /** Take what is new of some runs: { name: { state, planned, points: {…}, … } }. */
  add(found) {
    for (const [name, told] of Object.entries(found)) {
      if (!told) {
        this.runs.delete(name);
        continue;
      }
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
    return this.ofCase().filter(([name, { label, method, dataset, state, note }]) => {
      const text = `${name} ${label} ${method} ${dataset} ${state} ${note}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  draw() {
    const listed = this.listed();
    this.means = (this.wanted ?? this.fitting(listed)) === "mean";
    this.drawing.value = this.means ? "mean" : "runs";
    const measures = new Map(listed.filter(([, { measure }]) => measure)
      .map(([, { measure }]) => [measure.label, measure]));
    // Runs that measure different things have one axis.
    this.measure = measures.size === 1 ? [...measures.values()][0]
      : { ...SCORE, isError: [...measures.values()].some(({ isError }) => isError) };
    this.curves.querySelector("h2").textContent = this.measure.title;
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
      yLabel: this.measure.label,
      yRange: scoreRange(this.measure),
    });
    this.fillMeans(listed);
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

  /** Fill the table of means, but of single runs, which are no seeds of one method. */
  fillMeans(listed) {
    const groups = new Map();
    for (const [, one] of listed.filter(([, { single }]) => !single)) {
      const method = this.nameOf({ case: one.case, label: one.method });
      groups.set(method, [...(groups.get(method) ?? []), one]);
    }
    // A static page has a table of the results.
    this.meansPanel.hidden = !this.links || !groups.size;
    const heads = ["", "", ...MEANS.map(([key, head]) => (key === "accuracy" ? this.measure.label : head))];
    this.meanHeads[2].textContent = heads[2];
    refill(this.meanRows, ...[...groups].map(([method, runs]) => {
      const finished = runs.filter(({ state }) => state === "finished");
      const counted = finished.length ? finished : runs;
      const longest = Math.max(0, ...counted.map((one) => last(one, "time") ?? 0));
      const cells = MEANS.map(([key]) => {
        const found = meanAndDeviation(
          counted.map((one) => (key === "bytes" ? one.bytes : last(one, key))));
        const text = { time: (value) => timeText(value, longest),
          bytes: bytesText(Math.max(...counted.map(({ bytes }) => bytes ?? 0))) }[key] ??
          ((value) => number(value, 3));
        return found ? spread(found, counted.length, text) : "–";
      });
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      dot.style.setProperty("--colour", this.look(runs[0]).colour);
      return make("tr", { role: "row" },
        make("th", { scope: "row", role: "rowheader", class: "word" }, dot, make("bdi", {}, method)),
        make("td", { role: "cell", "data-head": "runs" }, finished.length < runs.length
          ? `${finished.length} of ${runs.length} finished` : number(runs.length)),
        ...cells.map((text, index) =>
          make("td", { role: "cell", "data-head": heads[index + 2] }, text)));
    }));
  }

  /** Return the columns of the table: those of all runs, and the settings that differ. */
  columns(listed) {
    const isIndex = listed.some(([, { single }]) => single);
    const settings = [...new Set(listed.flatMap(([, one]) => Object.keys(one.settings ?? {})))]
      .filter((key) => new Set(listed.map(([, { settings: of }]) => of?.[key])).size > 1)
      .map((key) => ({ key: `set ${key}`, head: key, value: ({ settings: of }) => of?.[key],
        text: (one, value) => (value === undefined ? "–" : value === "" ? "none" : String(value)) }));
    const isNoted = EDITS || listed.some(([, { note }]) => note);
    const known = COLUMNS.filter(({ key, ofIndex }) =>
      (isIndex || !ofIndex) && (isNoted || key !== "note"))
      .map((one) => (one.key === "accuracy" ? { ...one, head: this.measure.label } : one));
    const at = known.findIndex(({ key }) => key === "updates");
    return [...known.slice(0, at), ...settings, ...known.slice(at)];
  }

  fill(listed) {
    const columns = this.columns(listed);
    replaceIfNew(this.heads, columns.map((column) => this.headOf(column)));
    const rows = this.sorted(listed, columns).map(([name, one]) => {
      if (!this.rows.has(name)) this.rows.set(name, this.rowOf(name));
      const { element, first, box, dot, label, bar, note, remove, cells } = this.rows.get(name);
      box.checked = one.isDrawn;
      box.setAttribute("aria-label", `Draw ${one.label}`);
      dot.style.setProperty("--colour", this.look(one).colour);
      label.textContent = this.nameOf(one);
      bar.max = Number(one.planned) || 1;
      bar.value = one.updates ?? 0;
      bar.hidden = one.state === "finished";
      note.setAttribute("aria-label", `Note of ${one.label}`);
      if (document.activeElement !== note) note.value = one.note ?? "";
      remove.hidden = !EDITS || !one.single || one.state === "running";
      remove.setAttribute("aria-label", `Delete ${one.label}`);
      const shown = columns.slice(1).map(({ key, head, word, value, text }) => {
        if (!cells.has(key)) {
          const words = make("bdi", {});
          cells.set(key, { words, cell: make("td", { role: "cell", class: word ? "word" : "",
            "data-head": head }, ...(key === "updates" ? [bar, " "] : []), key === "note" ? note : words) });
        }
        const { words, cell } = cells.get(key);
        cell.dataset.head = head;
        const found = value ? value(one) : one[key];
        words.textContent = text ? text(one, found) : found ?? "–";
        return cell;
      });
      replaceIfNew(element, [first, ...shown]);
      return element;
    });
    replaceIfNew(this.body, rows);
  }

  /** Return the head of a column, which stays the same element and keeps the focus. */
  headOf({ key, head, word }) {
    if (!this.headCells.has(key)) {
      this.headCells.set(key, make("th", { scope: "col", role: "columnheader",
        class: word ? "word" : "" }, make("button", { type: "button", "data-key": key,
        onclick: () => this.sortBy(key) }, head)));
    }
    const found = this.headCells.get(key);
    found.firstChild.textContent = head;
    const sorted = this.down ? "descending" : "ascending";
    found.setAttribute("aria-sort", key === this.by ? sorted : "none");
    return found;
  }

  sortBy(key) {
    this.down = this.by === key && !this.down;
    this.by = key;
    this.changed();
  }

  /** Return the runs in the order of a column; those without a value are last in any order. */
  sorted(listed, columns) {
    const column = columns.find(({ key }) => key === this.by);
    if (!column) return listed;
    const of = ([, one]) => (column.value ? column.value(one) : one[column.key]) ?? "";
    return [...listed].sort((one, other) => {
      const [a, b] = [of(one), of(other)];
      if (a === "" || b === "") return Number(a === "") - Number(b === "");
      const order = typeof a === "number" && typeof b === "number"
        ? a - b : collator.compare(String(a), String(b));
      return this.down ? -order : order;
    });
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
    const remove = make("button", { type: "button", class: "small",
      onclick: () => this.askToDelete(name) }, "Delete");
    const first = make("th", { scope: "row", role: "rowheader", class: "word" }, box, " ", dot, link,
      " ", remove);
    const note = make("input", { type: "text", class: "written", maxlength: 500,
      readonly: !EDITS, placeholder: EDITS ? "add a note" : "",
      onchange: () => this.edit("note", name, note.value),
      onkeydown: ({ key }) => key === "Enter" && note.blur() });
    return { element: make("tr", { role: "row" }), first, box, dot, label, bar, note, remove,
      cells: new Map() };
  }

  /** Have the server change something of a run; return its answer, or null with the reason shown. */
  async edit(what, name, text = "") {
    let answer = null;
    let reason = "The dashboard does not answer.";
    try {
      const headers = { "raceme-edits": EDITS };
      const address = `${what}?run=${encodeURIComponent(name)}`;
      const found = await fetch(address, { method: "POST", headers, body: text });
      if (found.ok) answer = await found.text();
      else reason = await found.text();
    } catch { /* It has ended. */ }
    this.trouble.hidden = answer !== null;
    this.trouble.textContent = answer === null ? reason : "";
    return answer;
  }

  /** Show what is in the folder of a run, and delete it if that is confirmed. */
  async askToDelete(name) {
    const found = await this.edit("contents", name);
    if (found === null) return;
    const [folder, ...files] = found.split("\n");
    const close = () => dialog.close();
    const dialog = make("dialog", { class: "ask", "aria-labelledby": "title-delete",
      onclose: () => dialog.remove() },
    make("h2", { id: "title-delete" }, "Delete this run?"), make("p", {}, make("bdi", {}, folder)),
    make("ul", {}, ...files.map((text) => make("li", {}, make("bdi", {}, text)))),
    make("p", { class: "note" }, "The folder and all that is in it are deleted. This cannot be undone."),
    make("div", { class: "options" },
      make("button", { type: "button", autofocus: true, onclick: close }, "Keep"),
      make("button", { type: "button", class: "danger", onclick: () => {
        close();
        this.edit("delete", name);
      } }, "Delete")));
    document.body.append(dialog);
    dialog.showModal();
  }
}

const collator = new Intl.Collator("en", { numeric: true });

/** The secret of the printed address: gone from the address bar, but not from its tab. */
const EDITS = editsOfTab();

function editsOfTab() {
  if (location.protocol === "file:") return "";
  const given = new URLSearchParams(location.hash.slice(1)).get("edit");
  if (given) {
    sessionStorage.setItem("raceme-edits", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("raceme-edits") ?? "";
}

function last(one, column) {
  return one.points[column]?.at(-1);
}

/** Return a mean, of several values with their standard deviation in the unit of the mean. */
function spread([mean, deviation], count, text) {
  if (count < 2) return text(mean);
  return `${text(mean).replace(/ [a-zA-Z]+$/, "")} ± ${text(deviation)}`;
}

/** Return a function that writes bytes in the unit that suits a number of them. */
function bytesText(most) {
  const [divisor, unit] = most >= 1e9 ? [1e9, "GB"] : most >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return (bytes) => `${number(bytes / divisor, 1)} ${unit}`;
}

/** Replace the children of an element unless they are the same ones; what is kept keeps the focus. */
function replaceIfNew(element, children) {
  const held = element.children;
  if (children.length === held.length && children.every((one, index) => one === held[index])) return;
  const focused = document.activeElement;
  element.replaceChildren(...children);
  if (focused !== document.activeElement && element.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

const STARTED = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit",
  hourCycle: "h23" };

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
