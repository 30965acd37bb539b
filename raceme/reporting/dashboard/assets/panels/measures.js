// What only the method measures: a chart of each measure, or a table where values are no numbers.

import { overAxis, xOf } from "../axis.js";
import { Chart } from "../chart.js";
import { clusterColour, isDark, named, seriesLook } from "../colours.js";
import { note, panel } from "../panel.js";
import { countUntil } from "../run.js";
import { make, nameElement, number, plural, refill } from "../words.js";
import { tableOf } from "./trust.js";

const MOST = 12; // More clients or clusters than this are not shown one by one.

export class MeasuresPanel {
  constructor(board) {
    this.board = board;
    this.parts = [];
    this.body = make("div", {});
    this.element = panel("measures", "Measures of the method", "wide", this.body);
  }

  /** Whether the method has measured nothing as yet: the panel is not shown then. */
  get isEmpty() {
    return !this.board.run.tables.measures.rows;
  }

  draw(moment) {
    const { run } = this.board;
    const { measures } = run.tables;
    if (this.parts.length > measures.rows) this.parts = [];
    while (this.parts.length < measures.rows) this.parts.push(this.partOf(this.parts.length));
    const elements = this.parts.map((part) => part.element);
    if (elements.length !== this.body.children.length || elements[0] !== this.body.firstChild) {
      this.body.replaceChildren(...elements);
    }
    for (const part of this.parts) {
      const table = run.tables[`measure_${part.schema.name}`];
      const items = (table?.[part.schema.value] ?? []).map((value, row) =>
        itemsOf(part.schema, value, table, row));
      if (items.every((found) => found.every(([, value]) => isNumber(value)))) {
        this.drawChart(part, table, items, moment);
      } else this.drawTable(part, table, items, moment);
    }
  }

  partOf(row) {
    const { measures } = this.board.run.tables;
    const schema = Object.fromEntries(Object.keys(measures)
      .filter((column) => Array.isArray(measures[column]))
      .map((column) => [column, measures[column][row]]));
    const title = schema.title[0].toUpperCase() + schema.title.slice(1);
    const chart = new Chart(title, 220);
    const body = make("div", {}, ...chart.parts);
    return { schema, chart, body, element: make("div", {}, make("h3", {}, title), body) };
  }

  drawChart(part, table, items, moment) {
    const { run, axis } = this.board;
    const { schema } = part;
    const key = [run.revision, axis, isDark()].join();
    if (part.key !== key) {
      part.key = key;
      const x = xOf(run, axis, table);
      const rows = groupsOf(x);
      part.x = rows.map(([row]) => x[row]);
      part.lines = this.linesOf(schema, rows.map((found) => found.flatMap((row) => items[row])));
    }
    part.chart.draw({ x: part.x, lines: part.lines, ...overAxis(this.board, moment),
      yLabel: schema.of ? `share of the ${schema.of}` : schema.unit || schema.value });
  }

  /** Return a line for each key; of very many, and of several values at a time, mean and largest. */
  linesOf(schema, moments) {
    const keys = [...new Set(moments.flatMap((found) => found.map(([key]) => key)))];
    const isSingle = moments.every((found) => found.length <= 1) && !schema.per;
    if (isSingle || (schema.per && keys.length <= MOST)) {
      return keys.sort((one, other) => one - other).map((key, index) => ({
        key: String(key),
        name: schema.per ? this.nameOf(schema, key) : schema.value,
        ...(schema.per === "cluster" ? { colour: clusterColour(key) } : seriesLook(index)),
        values: moments.map((found) => found.find(([own]) => own === key)?.[1] ?? null),
      }));
    }
    const numbers = moments.map((found) => found.map(([, value]) => value));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    return [
      { key: "most", name: "largest", colour: named("muted"), dash: [6, 4],
        values: numbers.map((values) => Math.max(...values)) },
      { key: "mean", name: "mean", colour: named("ink"), width: 2.4, values: numbers.map(mean) },
    ];
  }

  /** Show the values of the moment. */
  drawTable(part, table, items, moment) {
    const { schema } = part;
    const found = items[countUntil(table.time, moment.time) - 1] ?? [];
    const text = (value) => (Array.isArray(value) ? value.map(String).join(", ") : String(value));
    const rows = found.slice(0, MOST).map(([key, value]) =>
      [nameElement(schema.per ? this.nameOf(schema, key) : schema.value), text(value)]);
    const more = found.length > MOST ? [note(`And ${plural(found.length - MOST, "more row")}.`)] : [];
    refill(part.body, rows.length ? tableOf([schema.per, schema.value], rows) : note("None now."),
      ...more);
  }

  nameOf(schema, key) {
    return schema.per === "client" ? this.board.run.nameOf(key) : `cluster ${number(key)}`;
  }
}

/** Return the values of a row by client or cluster, as shares where the schema says so. */
function itemsOf(schema, value, table, row) {
  const whole = schema.of ? table[schema.of][row] : 1;
  const items = schema.per ? value : [["", value]];
  return items.map(([key, own]) => [key, isNumber(own) && own !== null ? own / whole : own]);
}

/** Return the rows that stand at the same place of an ascending axis, together. */
function groupsOf(x) {
  const groups = [];
  x.forEach((value, row) => {
    if (row && value === x[row - 1]) groups.at(-1).push(row);
    else groups.push([row]);
  });
  return groups;
}

function isNumber(value) {
  return value === null || typeof value === "number";
}
