// How accurate the models are: the mean of the clients, the worst tenth, and each cluster.

import { Chart } from "../chart.js";
import { clusterDash, clusterColour, isDark, named } from "../colours.js";
import { overAxis, scoreRange, xOf } from "../axis.js";
import { panel } from "../panel.js";

const MOST_CLUSTERS = 16;

export class AccuracyPanel {
  constructor(board) {
    this.board = board;
    this.chart = new Chart("Accuracy over time: mean, worst tenth and each cluster", 300);
    this.element = panel("accuracy", "Accuracy", "wide", ...this.chart.parts);
    this.heading = this.element.querySelector("h2");
  }

  draw(moment) {
    const { run, axis } = this.board;
    const table = run.tables.evaluations;
    this.heading.textContent = run.measure.title;
    const key = [run.revision, axis, isDark()].join();
    if (this.key !== key) {
      this.key = key;
      this.x = xOf(run, axis, table);
      this.lines = this.linesOf(run, table);
    }
    this.chart.draw({ x: this.x, lines: this.lines, ...overAxis(this.board, moment),
      yLabel: run.measure.label, yRange: scoreRange(run.measure) });
  }

  linesOf(run, table) {
    const clusters = this.largest(table);
    const values = new Map(clusters.map((cluster) => [cluster, []]));
    for (let row = 0; row < table.rows; row += 1) {
      const means = new Map(table.clusters[row].map(([cluster, , mean]) => [cluster, mean]));
      for (const cluster of clusters) values.get(cluster).push(means.get(cluster) ?? undefined);
    }
    const ofClusters = clusters.map((cluster) => ({
      key: `cluster ${cluster}`,
      name: `cluster ${cluster}`,
      colour: clusterColour(cluster),
      dash: clusterDash(cluster),
      width: 1.2,
      values: values.get(cluster),
    }));
    return [
      ...(clusters.length > 1 ? ofClusters : []),
      { key: "worst", name: "worst tenth", colour: named("alarm"), dash: [6, 4], width: 1.8,
        values: table.worst ?? [] },
      { key: "mean", name: "mean of the clients", colour: named("ink"), width: 2.6,
        values: table.accuracy ?? [] },
    ];
  }

  /** Return the clusters that had the most clients, of all evaluations. */
  largest(table) {
    const sizes = new Map();
    for (const found of table.clusters ?? []) {
      for (const [cluster, clients] of found) {
        sizes.set(cluster, Math.max(sizes.get(cluster) ?? 0, clients));
      }
    }
    return [...sizes]
      .sort(([one, few], [other, many]) => many - few || one - other)
      .slice(0, MOST_CLUSTERS)
      .map(([cluster]) => cluster)
      .sort((one, other) => one - other);
  }
}
