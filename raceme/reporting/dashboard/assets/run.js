// A run as columns, built from the pieces that the server tells one after another.

/** Columns of each table; what a piece brings is appended. */
const TABLES = [
  "clients", "reasons", "presence", "greetings", "groups", "updates", "rejections", "verdicts",
  "claims", "versions", "warnings", "labels", "evaluations", "changes", "placements", "drifts", "numbers", "measures",
];

const STEPS = 2000; // Steps of the map's positions in one unit.

/** What evaluations measure, until the first one says it. */
export const SCORE = { label: "score", title: "Score", isError: false };

export class Run {
  constructor() {
    this.clear();
  }

  /** Forget everything: the run has begun anew. */
  clear() {
    this.tables = Object.fromEntries(TABLES.map((name) => [name, { rows: 0 }]));
    this.about = null;
    this.summary = null;
    this.failure = null;
    this.stopped = false;
    this.loading = true; // Events that there are already are still to come.
    this.ended = null;
    this.clock = "virtual time";
    this.frames = [];
    this.placed = [];
    this.streams = []; // Epochs: { time, bands: [[cluster, top, height]], flows }.
    this.measure = { ...SCORE };
    this.now = 0;
    this.revision = (this.revision ?? 0) + 1;
    this.clusters = [];
    this.seen = new Set();
    this.labels = new Map(); // Of clients that have any.
  }

  /** Append what a piece brings. */
  add(piece) {
    this.revision += 1;
    for (const [name, columns] of Object.entries(piece)) {
      // Tables of measures are declared by methods: their names come with their first rows.
      if (name.startsWith("measure_")) this.tables[name] ??= { rows: 0 };
      if (name in this.tables) this.append(name, columns);
    }
    if (piece.run) this.about = piece.run;
    if ("summary" in piece) this.summary = piece.summary;
    if ("failure" in piece) this.failure = piece.failure;
    if ("stopped" in piece) this.stopped = piece.stopped;
    if ("loading" in piece) this.loading = piece.loading;
    if (piece.ended) this.ended = piece.ended;
    if (piece.measure) this.measure = piece.measure;
    if (piece.clock) this.clock = piece.clock;
    if (piece.streams) this.streams.push(...piece.streams);
    if (piece.frame) this.addFrame(piece.frame);
    if (piece.now !== undefined) this.now = piece.now;
  }

  append(name, columns) {
    const table = this.tables[name];
    for (const [column, values] of Object.entries(columns)) {
      const held = (table[column] ??= []);
      for (const value of values) held.push(value);
      table.rows = held.length;
    }
    if (name === "labels") {
      columns.client.forEach((client, row) => this.labels.set(client, columns.text[row]));
    }
    if (name === "placements") for (const cluster of columns.cluster) this.meet(cluster);
    if (name === "evaluations") {
      table.values ??= [];
      for (const text of columns.scores) table.values.push(text === null ? null : floats(text));
      for (const found of columns.clusters) for (const [cluster] of found) this.meet(cluster);
    }
  }

  /** Keep a snapshot of the map: { time, names, x, y }. */
  addFrame({ time, new: names, clients, points }) {
    this.placed.push(...names);
    const steps = new Int16Array(bytesOf(points));
    const at = (axis) => clients.map((_, index) => steps[2 * index + axis] / STEPS);
    const frame = { time, names: clients.map((one) => this.placed[one]), x: at(0), y: at(1) };
    this.frames.push(frame);
  }

  meet(cluster) {
    if (cluster < 0 || this.seen.has(cluster)) return;
    this.seen.add(cluster);
    this.clusters = [...this.seen].sort((one, other) => one - other);
  }

  /** Return the number of each client by name. */
  get numbers() {
    const names = this.tables.clients.name ?? [];
    if (this.known?.size !== names.length) {
      this.known = new Map(names.map((name, number) => [name, number]));
    }
    return this.known;
  }

  /** Until when the run has gone, in seconds. */
  get end() {
    return this.ended ? this.ended.time : this.now;
  }

  get isOver() {
    return this.ended !== null || this.summary !== null || this.failure !== null || this.stopped;
  }

  /** Why the run ended without a result, in words; nothing if it did not. */
  get crash() {
    if (this.failure) return `The run failed: ${this.failure}`;
    const isUnfinished = this.stopped && this.ended === null && this.summary === null;
    return isUnfinished ? "The run was killed: its process ended without a result." : "";
  }

  get size() {
    return this.tables.clients.rows;
  }

  nameOf(client) {
    return this.tables.clients.name[client];
  }
}

/** Return the 32-bit floats of a text in base64. */
function floats(text) {
  return new Float32Array(bytesOf(text));
}

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}

/** Return how many of ascending values are not above a limit. */
export function countUntil(values, limit) {
  let low = 0;
  let high = values?.length ?? 0;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}
