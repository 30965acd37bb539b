// The clusters as streams: as high as they have clients, from the first to the last.

import { Canvas, pictureButton, ticks, tickTexts } from "../canvas.js";
import { clusterColour, isDark, named } from "../colours.js";
import { extent, layOut, partsInto } from "../layout.js";
import { note, panel } from "../panel.js";
import { make, number, refill, timeUnit } from "../words.js";

const BOTTOM = 38;
const TOP = 22;
const TURN = 0.022; // A bend is as long as this share of the width, or as the epoch.

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
    if (this.revision !== run.revision) {
      this.revision = run.revision;
      this.laid = layOut(run);
      this.range = extent(this.laid.epochs);
    }
    const context = this.canvas.begin();
    const { width, height } = this.canvas;
    const end = run.end || 1;
    this.left = 8;
    const right = width - 8;
    this.toX = (time) => this.left + (time / end) * (right - this.left);
    const [low, high] = this.range;
    const unit = (height - TOP - BOTTOM) / (high - low);
    this.toY = (y) => TOP + (y - low) * unit;
    const until = this.toX(moment.time);
    this.drawAxis(context, end, right);
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height - BOTTOM + 4);
    context.clip();
    this.drawBands(context, end, unit);
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

  drawBands(context, end, unit) {
    const { epochs } = this.laid;
    epochs.forEach((epoch, index) => {
      const next = epochs[index + 1]?.time ?? end;
      const [start, stop] = [this.toX(epoch.time), this.toX(next)];
      const before = epochs[index - 1]?.bands;
      const turn = before ? Math.min(TURN * this.canvas.width, stop - start) : 0;
      for (const [cluster, [top, size]] of epoch.bands) {
        context.fillStyle = clusterColour(cluster);
        // Half a pixel more hides the seam between two epochs.
        const x = start + turn;
        context.fillRect(x - 0.5, this.toY(top), stop - x + 1, Math.max(size * unit, 0.7));
      }
      if (!before) return;
      for (const part of partsInto(before, epoch)) this.drawFlow(context, part, start, turn, unit);
    });
  }

  drawFlow(context, part, start, turn, unit) {
    const [from, to] = [this.toY(part.begins), this.toY(part.ends)];
    const high = Math.max(part.clients * unit, 0.7);
    const [x, middle, stop] = [start - 0.5, start + turn / 2, start + turn + 0.5];
    context.fillStyle = clusterColour(part.to < 0 ? part.from : part.to);
    context.beginPath();
    context.moveTo(x, from);
    context.bezierCurveTo(middle, from, middle, to, stop, to);
    context.lineTo(stop, to + high);
    context.bezierCurveTo(middle, to + high, middle, from + high, x, from + high);
    context.closePath();
    context.fill();
  }

  drawAxis(context, end, right) {
    const [seconds, symbol] = timeUnit(end);
    const y = this.canvas.height - BOTTOM + 6;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = named("muted");
    context.strokeStyle = named("line");
    context.textAlign = "center";
    context.textBaseline = "top";
    const found = ticks(0, end / seconds, this.canvas.width / 90);
    const texts = tickTexts(found);
    for (const [index, tick] of found.entries()) {
      const x = this.toX(tick * seconds);
      context.beginPath();
      context.moveTo(x, TOP - 4);
      context.lineTo(x, y);
      context.stroke();
      context.textAlign = x < 30 ? "left" : x > right - 30 ? "right" : "center";
      context.fillText(texts[index], x, y + 2);
    }
    context.textAlign = "right";
    context.fillText(`${this.board.run.clock} (${symbol})`, right, y + 17);
  }

  /** Mark drifts by lines, and splits and merges by signs at the top. */
  drawMarks(context, moment) {
    const { drifts, changes } = this.board.run.tables;
    context.strokeStyle = named("ink");
    context.lineWidth = 1;
    for (let row = 0; row < drifts.rows; row += 1) {
      if (row && drifts.time[row] === drifts.time[row - 1]) continue;
      const x = this.toX(drifts.time[row]);
      context.setLineDash([2, 3]);
      context.strokeRect(x, TOP - 8, 0, this.canvas.height - TOP - BOTTOM + 8);
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
    this.note.textContent = words.length
      ? `Marks above: ${words.join(" · ")}. The height of a band is its number of clients.`
      : "The height of a band is its number of clients.";
  }

  fillChips(moment) {
    const members = moment.members();
    const key = isDark() + JSON.stringify([...members].map(([cluster, found]) => [cluster, found.length]));
    if (key === this.key) return;
    this.key = key;
    const chips = [...members].slice(0, 40).map(([cluster, found]) => {
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      dot.style.setProperty("--colour", clusterColour(cluster));
      const text = `cluster ${cluster}`;
      const size = make("span", { class: "value" }, number(found.length));
      return make("button", { type: "button", class: "chip",
        onclick: () => this.board.select({ cluster }) }, dot, text, size);
    });
    if (members.size > 40) chips.push(make("span", {}, `and ${members.size - 40} more`));
    refill(this.chips, ...chips);
  }

  click(event) {
    const [x, y] = this.canvas.at(event);
    for (const epoch of [...this.laid.epochs].reverse()) {
      if (this.toX(epoch.time) > x) continue;
      for (const [cluster, [top, size]] of epoch.bands) {
        if (y >= this.toY(top) - 3 && y <= this.toY(top + size) + 3) {
          this.board.select({ cluster });
          return;
        }
      }
      return;
    }
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
