// One client's or one cluster's own history, beside the page.

import { Chart } from "../chart.js";
import { overAxis, scoreRange, xOf } from "../axis.js";
import { clusterColour, named } from "../colours.js";
import { make, nameElement, number, reasonText, refill, timeText } from "../words.js";
import { updatesOf } from "./devices.js";
import { tableOf } from "./trust.js";

const MOST_MEMBERS = 200;
const MOST_ROWS = 40;

export class DetailPanel {
  constructor(board) {
    this.board = board;
    this.title = make("h2", { id: "title-detail", tabindex: "-1" });
    this.body = make("div", {});
    this.chart = new Chart("Accuracy over time", 200);
    const close = make("button", { type: "button", class: "close", "aria-label": "Close",
      onclick: () => board.select(null) }, "×");
    this.element = make("aside", { class: "panel detail", "aria-labelledby": "title-detail",
      hidden: true }, close, this.title, this.chart.element, this.chart.legend, this.body);
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") board.select(null);
    });
  }

  /** Show the history of what was selected, or nothing. */
  open(selection) {
    this.opener = selection ? document.activeElement : this.opener;
    this.element.hidden = !selection;
    this.key = null;
    if (selection) requestAnimationFrame(() => this.title.focus({ preventScroll: true }));
    else this.back()?.focus({ preventScroll: true });
  }

  /** Return what the history was opened from; its row of the table may be another one by now. */
  back() {
    const { opener } = this;
    if (!opener || opener.isConnected) return opener;
    return document.querySelector(`.clients [data-client="${opener.dataset.client}"]`);
  }

  draw(moment) {
    const { selection, run } = this.board;
    if (!selection) return;
    const key = [JSON.stringify(selection), run.revision, moment.time].join();
    if (key === this.key) return;
    this.key = key;
    if ("client" in selection) this.drawClient(selection.client, moment);
    else this.drawCluster(selection.cluster, moment);
  }

  drawClient(client, moment) {
    const { run } = this.board;
    const { updates, rejections, reasons, placements } = run.tables;
    const rows = updatesOf(run, client, moment.time);
    this.title.replaceChildren(nameElement(run.nameOf(client)));
    this.show(this.curve(client), moment);
    const labels = run.labels.get(client);
    const lines = [
      ...(labels ? [["labels", labels]] : []),
      ["cluster", moment.cluster[client] < 0 ? "–" : String(moment.cluster[client])],
      ["true group", moment.group[client] < 0 ? "–" : String(moment.group[client])],
      ["examples", number(moment.examples[client])],
      ["updates", number(rows.length)],
      ["mean staleness", number(moment.staleness[client] / rows.length, 1)],
      ["last training loss", number(updates.loss?.[rows.at(-1)], 3)],
      ["rejected", number(moment.rejected[client])],
      [run.measure.label, number(moment.accuracyOf(client), 3)],
    ];
    const parts = [tableOf(["", ""], lines)];
    const homes = [];
    for (let row = 0; row < placements.rows && placements.time[row] <= moment.time; row += 1) {
      if (placements.client[row] !== client) continue;
      homes.push([timeText(placements.time[row], run.end), this.placeOf(row)]);
    }
    if (homes.length > 1) {
      parts.push(make("h3", {}, "Where it was"),
        tableOf(["since", "cluster"], homes.slice(-MOST_ROWS).reverse()));
    }
    const refused = [];
    for (let row = 0; row < moment.refused; row += 1) {
      if (rejections.client[row] !== client) continue;
      refused.push([timeText(rejections.time[row], run.end),
        nameElement(reasonText(reasons.text[rejections.reason[row]]))]);
    }
    if (refused.length) {
      parts.push(make("h3", {}, "Rejected"),
        tableOf(["at", "reason"], refused.slice(-MOST_ROWS).reverse()));
    }
    refill(this.body, ...parts);
  }

  placeOf(row) {
    const { placements } = this.board.run.tables;
    const weights = placements.weights[row];
    if (!weights) return placements.cluster[row] < 0 ? "none" : String(placements.cluster[row]);
    return Object.entries(weights)
      .map(([cluster, weight]) => `${cluster} (${number(weight, 2)})`)
      .join(", ");
  }

  drawCluster(cluster, moment) {
    const { run } = this.board;
    const members = moment.members().get(cluster) ?? [];
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    dot.style.setProperty("--colour", clusterColour(cluster));
    this.title.replaceChildren(dot, `Cluster ${cluster}`);
    this.show(this.clusterCurve(cluster), moment);
    const groups = new Map();
    for (const client of members) {
      const group = moment.group[client];
      if (group >= 0) groups.set(group, (groups.get(group) ?? 0) + 1);
    }
    const lines = [["clients", number(members.length)], ...this.birth(cluster, moment)];
    const parts = [tableOf(["", ""], lines)];
    if (groups.size) {
      parts.push(make("h3", {}, "True groups"), tableOf(["group", "clients"],
        [...groups].sort(([one], [other]) => one - other).map((pair) => pair.map(String))));
    }
    const buttons = members.slice(0, MOST_MEMBERS).map((client) =>
      make("li", {}, make("button", { type: "button", class: "link",
        onclick: () => this.board.select({ client }) }, nameElement(run.nameOf(client)))));
    const more = members.length - buttons.length;
    if (more > 0) buttons.push(make("li", {}, `and ${number(more)} more`));
    if (buttons.length) {
      parts.push(make("h3", {}, "Members"), make("ul", { class: "ids" }, ...buttons));
    }
    refill(this.body, ...parts);
  }

  /** Return when a cluster was made and given up. */
  birth(cluster, moment) {
    const { changes } = this.board.run.tables;
    const lines = [];
    const text = (row) => timeText(changes.time[row], this.board.run.end);
    for (let row = 0; row < changes.rows && changes.time[row] <= moment.time; row += 1) {
      const [made, gone] = [changes.made[row], changes.gone[row]];
      if (made.includes(cluster)) {
        lines.push(["made", gone.length ? `${text(row)}, of ${gone.join(", ")}` : text(row)]);
      }
      if (gone.includes(cluster)) {
        lines.push(["ended", made.length ? `${text(row)}, became ${made.join(", ")}` : text(row)]);
      }
    }
    return lines;
  }

  curve(client) {
    const { values = [] } = this.board.run.tables.evaluations;
    const found = values.map((scores) => {
      const value = scores?.[client];
      return value === undefined || Number.isNaN(value) ? undefined : value;
    });
    return { key: "client", name: "this client", colour: named("accent"), width: 2, values: found };
  }

  clusterCurve(cluster) {
    const { clusters = [] } = this.board.run.tables.evaluations;
    const found = clusters.map((all) => all.find(([one]) => one === cluster)?.[2]);
    return { key: `cluster ${cluster}`, name: `cluster ${cluster}`, width: 2,
      colour: clusterColour(cluster), values: found.map((value) => value ?? undefined) };
  }

  show(line, moment) {
    const { run, axis } = this.board;
    const table = run.tables.evaluations;
    const mean = { key: "mean", name: "mean of the clients", colour: named("muted"), width: 1.2,
      values: table.accuracy ?? [] };
    this.chart.draw({ x: xOf(run, axis, table), lines: [mean, line],
      ...overAxis(this.board, moment), yLabel: run.measure.label,
      yRange: scoreRange(run.measure) });
  }
}

