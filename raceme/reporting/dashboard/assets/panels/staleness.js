// How stale updates were when they came.

import { named } from "../colours.js";
import { Canvas, pictureButton } from "../canvas.js";
import { note, panel } from "../panel.js";
import { make, number } from "../words.js";

const MOST_BINS = 30;
const [TOP, BOTTOM] = [10, 36];
const LEAST_LEFT = 46; // More if the numbers are longer.

export class StalenessPanel {
  constructor(board) {
    this.board = board;
    this.canvas = new Canvas(230, "Staleness of the updates", () => board.changed());
    this.note = note("");
    this.element = panel("staleness", "Staleness", "",
      make("div", { class: "options" }, pictureButton(this.canvas, "Staleness", () => [])),
      this.canvas.element, this.note);
  }

  draw(moment) {
    const { updates } = this.board.run.tables;
    const values = updates.staleness ?? [];
    let [most, sum] = [0, 0];
    for (let row = 0; row < moment.applied; row += 1) {
      most = Math.max(most, values[row]);
      sum += values[row];
    }
    const wide = Math.max(1, Math.ceil((most + 1) / MOST_BINS));
    const bins = new Array(Math.floor(most / wide) + 1).fill(0);
    for (let row = 0; row < moment.applied; row += 1) bins[Math.floor(values[row] / wide)] += 1;
    this.paint(bins, wide);
    const mean = moment.applied ? number(sum / moment.applied, 1) : "–";
    this.note.textContent = `Aggregations into the model since it was sent to the client: mean ` +
      `${mean}, at most ${number(most)}.`;
    this.canvas.element.setAttribute("aria-label", `Staleness: mean ${mean}, at most ${most}`);
  }

  paint(bins, binWidth) {
    const context = this.canvas.begin();
    const { width, height } = this.canvas;
    const most = Math.max(1, ...bins);
    context.font = "12px system-ui, sans-serif";
    const left = Math.max(LEAST_LEFT, context.measureText(number(most)).width + 10);
    const [inner, deep] = [width - left - 8, height - TOP - BOTTOM];
    const step = inner / bins.length;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      const y = TOP + deep * (1 - part);
      context.fillStyle = named("line");
      context.fillRect(left, y, inner, 1);
      context.fillStyle = named("muted");
      if (part !== 0.5 || most > 1) context.fillText(number(Math.round(most * part)), left - 6, y);
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    const every = Math.ceil(28 / step);
    bins.forEach((count, bin) => {
      const high = (count / most) * deep;
      context.fillStyle = named("accent");
      context.fillRect(left + bin * step + 1, TOP + deep - high, Math.max(step - 2, 1), high);
      if (bin % every) return;
      context.fillStyle = named("muted");
      context.fillText(number(bin * binWidth), left + (bin + 0.5) * step, TOP + deep + 4);
    });
    context.textAlign = "right";
    context.fillStyle = named("muted");
    context.fillText("staleness", width - 8, TOP + deep + 19);
  }
}
