// A run at one moment: what every panel shows.

import { countUntil } from "./run.js";

/** The state of a run at a time. Arrays have one element per client, by number. */
export class Moment {
  constructor(run, time) {
    this.run = run;
    this.time = time;
    const size = run.size;
    this.cluster = new Int32Array(size).fill(-1);
    this.group = new Int32Array(size).fill(-1);
    this.examples = new Int32Array(size);
    this.online = new Uint8Array(size);
    this.known = new Uint8Array(size);
    this.updates = new Int32Array(size);
    this.rejected = new Int32Array(size);
    this.staleness = new Float64Array(size);
    this.lastUpdate = new Float64Array(size).fill(-1);
    this.excluded = new Uint8Array(size);
    this.accuracy = null;
    this.evaluation = -1;
    this.fill();
  }

  fill() {
    const { tables } = this.run;
    this.each("greetings", (table, row) => {
      const client = table.client[row];
      this.group[client] = table.group[row] ?? -1;
      this.examples[client] = table.examples[row];
      this.known[client] = 1;
    });
    this.each("groups", (table, row) => (this.group[table.client[row]] = table.group[row]));
    this.each("presence", (table, row) => (this.online[table.client[row]] = table.online[row]));
    this.each("placements", (table, row) => (this.cluster[table.client[row]] = table.cluster[row]));
    this.applied = this.each("updates", (table, row) => {
      const client = table.client[row];
      this.updates[client] += 1;
      this.staleness[client] += table.staleness[row];
      this.lastUpdate[client] = table.time[row];
    });
    this.refused = this.each("rejections", (table, row) => {
      this.rejected[table.client[row]] += 1;
    });
    this.verdicts = this.each("verdicts", (table, row) => {
      const verdict = table.verdict[row];
      if (verdict === "excluded") this.excluded[table.client[row]] = 1;
      if (verdict === "readmitted") this.excluded[table.client[row]] = 0;
    });
    this.evaluation = countUntil(tables.evaluations.time, this.time) - 1;
    for (let row = this.evaluation; row >= 0 && this.accuracy === null; row -= 1) {
      this.accuracy = tables.evaluations.values[row];
    }
    const numbers = countUntil(tables.numbers.time, this.time) - 1;
    this.clusters = numbers < 0 ? 0 : tables.numbers.clusters[numbers];
    this.purity = numbers < 0 ? null : tables.numbers.purity[numbers];
  }

  /** Call a function with each row of a table until the moment; return their number. */
  each(name, call) {
    const table = this.run.tables[name];
    const rows = countUntil(table.time, this.time);
    for (let row = 0; row < rows; row += 1) call(table, row);
    return rows;
  }

  /** Return a column of the latest evaluation. */
  evaluated(column) {
    return this.evaluation < 0 ? null : this.run.tables.evaluations[column][this.evaluation];
  }

  accuracyOf(client) {
    const value = this.accuracy?.[client];
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  /** Return the members of each cluster that has any, by cluster. */
  members() {
    if (this.found) return this.found;
    const found = new Map();
    this.cluster.forEach((cluster, client) => {
      if (cluster < 0) return;
      if (!found.has(cluster)) found.set(cluster, []);
      found.get(cluster).push(client);
    });
    this.found = new Map([...found].sort(([one], [other]) => one - other));
    return this.found;
  }
}
