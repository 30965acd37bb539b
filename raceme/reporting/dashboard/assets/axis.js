// What stands below a chart: time on the run's clock, or updates.

import { named } from "./colours.js";
import { countUntil } from "./run.js";
import { timeUnit } from "./words.js";

export const AXES = { time: "time", updates: "updates" };

/** Return the values of an axis for the rows of a table with times. */
export function xOf(run, axis, table) {
  return Array.from({ length: table.rows }, (_, row) =>
    axis === "updates" && table.updates
      ? table.updates[row]
      : positionOn(run, axis, table.time[row]),
  );
}

/** Return where a time lies on an axis. */
export function positionOn(run, axis, time) {
  if (axis === "updates") return countUntil(run.tables.updates.time, time);
  return time / timeUnit(run.end)[0];
}

/** Return what all charts over the axis of the board have: label, range, marks and the moment. */
export function overAxis({ run, axis }, moment) {
  return {
    xLabel: xLabelOf(run, axis),
    range: () => [0, positionOn(run, axis, run.end) || 1],
    marks: marksOf(run, axis),
    until: positionOn(run, axis, moment.time),
  };
}

/** Return the range of an axis of accuracies, or of errors. */
export function scoreRange({ isError }) {
  return (_, low, high) => (isError ? [0, (high ?? 1) * 1.05] : [0, 1]);
}

function xLabelOf(run, axis) {
  if (axis === "updates") return "updates";
  return `${run.clock} (${timeUnit(run.end)[1]})`;
}

/** Return the marks of drifts, splits and merges on an axis. */
function marksOf(run, axis) {
  const marks = [];
  const { drifts, changes } = run.tables;
  let last = null;
  for (let row = 0; row < drifts.rows; row += 1) {
    if (drifts.time[row] === last) continue;
    last = drifts.time[row];
    marks.push({ at: positionOn(run, axis, last), name: "data change", colour: named("muted"),
      dash: [] });
  }
  for (let row = 0; row < changes.rows; row += 1) {
    if (!["split", "merge"].includes(changes.kind[row]) || !changes.time[row]) continue;
    marks.push({ at: positionOn(run, axis, changes.time[row]), name: changes.kind[row],
      colour: named("faint"), dash: changes.kind[row] === "split" ? [4, 3] : [1, 3] });
  }
  return marks.length > 200 ? [] : marks;
}
