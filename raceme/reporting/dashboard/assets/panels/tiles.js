// The numbers that are seen first.

import { make, number, plural, timeText } from "../words.js";

export class TilesPanel {
  constructor(board) {
    this.board = board;
    this.values = new Map();
    this.element = make("dl", { class: "tiles" });
    for (const key of ["accuracy", "worst", "clusters", "updates", "rejected", "time"]) {
      const [name, value, below] = [make("dt"), make("dd", { class: "value" }),
        make("dd", { class: "below" })];
      value.dataset.tile = key;
      this.values.set(key, [name, value, below]);
      this.element.append(make("div", { class: "tile" }, name, value, below));
    }
  }

  draw(moment) {
    const { run } = this.board;
    const planned = run.about?.["max-updates"];
    const online = moment.online.reduce((sum, one) => sum + one, 0);
    const share = planned ? ` · ${number((100 * moment.applied) / planned)} %` : "";
    this.set("accuracy", run.measure.label, number(moment.evaluated("accuracy"), 3),
      `best ${number(moment.evaluated("best"), 3)}`);
    this.set("worst", "worst tenth", number(moment.evaluated("worst"), 3), "of the clients");
    this.set("clusters", "clusters", number(moment.clusters),
      moment.purity === null ? "" : `purity ${number(moment.purity, 3)}`);
    this.set("updates", "updates", number(moment.applied),
      planned ? `of ${number(planned)}${share}` : "");
    this.set("rejected", "rejected", number(moment.refused),
      `${number(online)} of ${plural(run.size, "client")} online`);
    this.set("time", run.clock, timeText(moment.time, run.end), this.wall());
  }

  wall() {
    const { summary } = this.board.run;
    if (!summary?.wall_time) return "";
    const rate = summary.updates_per_second;
    return `${timeText(summary.wall_time, summary.wall_time)} wall time${rate ? ` · ${number(rate)}/s` : ""}`;
  }

  set(key, ...texts) {
    this.values.get(key).forEach((element, index) => {
      if (element.textContent !== texts[index]) element.textContent = texts[index];
    });
  }
}
