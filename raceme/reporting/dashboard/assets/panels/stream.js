// The clusters as streams, as high as the weights of their clients; the server lays them out.

import { Canvas, pictureButton, timeAxis } from "../canvas.js";
import { clusterColour, isDark, named } from "../colours.js";
import { note, panel } from "../panel.js";
import { make, number, refill } from "../words.js";

const BOTTOM = 38;
const TOP = 22;
const TURN = 0.022; // A bend is as long as this share of the width, or as the epoch.
const MOST_CHIPS = 40;

export class StreamPanel {
  constructor(board) {
    this.board = board;
    this.canvas = new Canvas(280, "Clusters over time", () => board.changed());
    this.chips = make("div", { class: "chips", role: "group", "aria-label": "Clusters" });
    this.note = note("");
    this.element = panel("clusters", "Clusters over time", "wide",
      make("div", { class: "options" },
        pictureButton(this.canvas, "Clusters over time", () => board.run.clusters)),
      this.canvas.element, this.chips, this.note);
    this.canvas.element.addEventListener("click", (event) => this.click(event));
  }

  draw(moment) {
    const { run } = this.board;
    const context = this.canvas.begin();
    const { width, height } = this.canvas;
    const [left, right] = [8, width - 8];
    this.toX = (time) => left + (time / (run.end || 1)) * (right - left);
    const bands = run.streams.flatMap((epoch) => epoch.bands);
    const low = bands.reduce((least, [, top]) => Math.min(least, top), 0);
    const high = bands.reduce((most, [, top, size]) => Math.max(most, top + size), low + 1e-6);
    const unit = (height - TOP - BOTTOM) / (high - low);
    this.toY = (y) => TOP + (y - low) * unit;
    const until = this.toX(moment.time);
    timeAxis(context, run, [0, run.end || 1], this.toX, [TOP - 4, height - BOTTOM + 6]);
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height - BOTTOM + 4);
    context.clip();
    this.drawStreams(context, unit);
    if (until < right - 1) {
      context.globalAlpha = 0.78;
      context.fillStyle = named("card");
      context.fillRect(until, 0, width - until, height);
      context.globalAlpha = 1;
      context.fillStyle = named("ink");
      context.fillRect(until, TOP - 8, 1, height - TOP - BOTTOM + 8);
    }
    context.restore();
    this.drawMarks(context, moment);
    this.fillChips(moment);
  }

  drawStreams(context, unit) {
    const { streams, end } = this.board.run;
    streams.forEach((epoch, index) => {
      const [start, stop] = [epoch.time, streams[index + 1]?.time ?? end].map(this.toX);
      const turn = index ? Math.min(TURN * this.canvas.width, stop - start) : 0;
      for (const [cluster, top, size] of epoch.bands) {
        context.fillStyle = clusterColour(cluster);
        // Half a pixel more hides the seam between two epochs.
        const x = start + turn;
        context.fillRect(x - 0.5, this.toY(top), stop - x + 1, Math.max(size * unit, 0.7));
      }
      for (const [source, target, begins, ends, size] of epoch.flows) {
        const [from, to, high] = [this.toY(begins), this.toY(ends), Math.max(size * unit, 0.7)];
        const [x, middle, last] = [start - 0.5, start + turn / 2, start + turn + 0.5];
        context.fillStyle = clusterColour(target ?? source);
        context.beginPath();
        context.moveTo(x, from);
        context.bezierCurveTo(middle, from, middle, to, last, to);
        context.lineTo(last, to + high);
        context.bezierCurveTo(middle, to + high, middle, from + high, x, from + high);
        context.closePath();
        context.fill();
      }
    });
  }

  /** Mark drifts by lines, and splits and merges by signs at the top. */
  drawMarks(context, moment) {
    const { drifts, changes } = this.board.run.tables;
    context.strokeStyle = named("ink");
    context.lineWidth = 1;
    context.setLineDash([2, 3]);
    for (const time of new Set(drifts.time)) {
      context.strokeRect(this.toX(time), TOP - 8, 0, this.canvas.height - TOP - BOTTOM + 8);
    }
    context.setLineDash([]);
    context.lineWidth = 1.3;
    const said = new Map();
    for (let row = 0; row < changes.rows; row += 1) {
      const kind = changes.kind[row];
      if (!(kind in SIGNS) || !changes.time[row] || changes.time[row] > moment.time) continue;
      said.set(kind, (said.get(kind) ?? 0) + 1);
      const x = this.toX(changes.time[row]);
      context.beginPath();
      for (const line of SIGNS[kind]) {
        line.forEach(([dx, dy], index) => {
          context[index ? "lineTo" : "moveTo"](x + dx * 5, 9 + dy * 5);
        });
      }
      context.stroke();
    }
    const words = [...said].map(([kind, count]) => `${WORDS[kind]}: ${count}`);
    const drifted = new Set(drifts.time?.filter((time) => time <= moment.time)).size;
    if (drifted) words.push(`data changed (dotted): ${drifted}`);
    const marks = words.length ? `Marks above: ${words.join(" · ")}. ` : "";
    this.note.textContent = `${marks}The height of a stream is its number of clients.`;
  }

  fillChips(moment) {
    const members = moment.members();
    const key = isDark() + JSON.stringify([...members].map(([cluster, found]) => [cluster, found.length]));
    if (key === this.key) return;
    this.key = key;
    const chips = [...members].slice(0, MOST_CHIPS).map(([cluster, found]) => {
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      dot.style.setProperty("--colour", clusterColour(cluster));
      return make("button", { type: "button", class: "chip",
        onclick: () => this.board.select({ cluster }) }, dot, `cluster ${cluster}`,
      make("span", { class: "value" }, number(found.length)));
    });
    const more = members.size - MOST_CHIPS;
    refill(this.chips, ...chips, ...(more > 0 ? [make("span", {}, `and ${more} more`)] : []));
  }

  click(event) {
    const [x, y] = this.canvas.at(event);
    const epoch = this.board.run.streams.findLast(({ time }) => this.toX(time) <= x);
    const found = epoch?.bands.find(([, top, size]) =>
      y >= this.toY(top) - 3 && y <= this.toY(top + size) + 3);
    if (found) this.board.select({ cluster: found[0] });
  }
}

// Lines that part, lines that meet, a plus, a cross: as in the run's figures.
const SIGNS = {
  split: [[[-1, 0], [0, 0], [1, 0.9]], [[0, 0], [1, -0.9]]],
  merge: [[[1, 0], [0, 0], [-1, 0.9]], [[0, 0], [-1, -0.9]]],
  found: [[[-0.8, 0], [0.8, 0]], [[0, -0.8], [0, 0.8]]],
  retire: [[[-0.7, -0.7], [0.7, 0.7]], [[-0.7, 0.7], [0.7, -0.7]]],
};
const WORDS = { split: "splits", merge: "merges", found: "new clusters", retire: "given up" };
