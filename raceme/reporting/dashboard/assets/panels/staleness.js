// How stale updates were when they came.

import { Chart } from "../chart.js";
import { named } from "../colours.js";
import { note, panel } from "../panel.js";
import { number } from "../words.js";

const MOST_BINS = 30;

export class StalenessPanel {
  constructor(board) {
    this.board = board;
    this.chart = new Chart("Staleness of the updates", 230, false);
    this.note = note("");
    this.element = panel("staleness", "Staleness", "", ...this.chart.parts.slice(0, 2), this.note);
  }

  draw(moment) {
    const values = this.board.run.tables.updates.staleness ?? [];
    let [most, sum] = [0, 0];
    for (let row = 0; row < moment.applied; row += 1) {
      most = Math.max(most, values[row]);
      sum += values[row];
    }
    const wide = Math.max(1, Math.ceil((most + 1) / MOST_BINS));
    const bins = new Array(Math.floor(most / wide) + 1).fill(0);
    for (let row = 0; row < moment.applied; row += 1) bins[Math.floor(values[row] / wide)] += 1;
    this.chart.draw({
      x: bins.map((_, bin) => bin * wide),
      lines: [{ key: "updates", name: "updates", colour: named("accent"), bars: true, values: bins }],
      xLabel: "staleness",
      yLabel: "updates",
      range: () => [-wide, most + wide],
      yRange: (_, low, high) => [0, 1.05 * Math.max(1, high)],
    });
    const mean = moment.applied ? number(sum / moment.applied, 1) : "–";
    this.note.textContent = `Aggregations into the model since it was sent to the client: mean ` +
      `${mean}, at most ${number(most)}.`;
  }
}
