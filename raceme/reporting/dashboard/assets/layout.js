// Where clusters lie above each other over time, and how many clients go from which to which.

const GAP = 0.03; // Room between two clusters, as a share of all clients.
const MOST = 400; // More moments of change than this are put together.

/**
 * Lay out the clusters of a run.
 *
 * Returns { epochs, size, gap }. An epoch is a stretch of time in which nothing changes:
 * { time, bands: Map(cluster → [top, size]), flows: [[from, to, count]] }, where the flows lead into
 * it and a cluster of −1 is none.
 */
export function layOut(run) {
  const table = run.tables.placements;
  const cluster = new Int32Array(run.size).fill(-1);
  const sizes = new Map();
  let order = [];
  const epochs = [];
  const least = run.end / MOST;
  let row = 0;
  while (row < table.rows) {
    const time = table.time[row];
    const until = epochs.length ? time + least : time;
    const before = new Map();
    // What happens at nearly the same time is one change.
    for (; row < table.rows && table.time[row] <= until; row += 1) {
      const client = table.client[row];
      if (!before.has(client)) before.set(client, cluster[client]);
      cluster[client] = table.cluster[row];
    }
    const flows = new Map();
    for (const [client, from] of before) {
      const to = cluster[client];
      if (from === to) continue;
      count(sizes, from, -1);
      count(sizes, to, 1);
      count(flows, `${from} ${to}`, 1);
    }
    if (!flows.size) continue;
    const led = [...flows].map(([key, clients]) => [...key.split(" ").map(Number), clients]);
    order = arranged(order, sizes, led);
    epochs.push({ time, flows: led, bands: bandsOf(order, sizes, run.size) });
  }
  return { epochs, size: run.size, gap: gapOf(run.size) };
}

function count(counts, key, change) {
  if (key === -1) return;
  const value = (counts.get(key) ?? 0) + change;
  if (value) counts.set(key, value);
  else counts.delete(key);
}

/** Put new clusters where their members come from, and leave the others in their order. */
function arranged(order, sizes, flows) {
  const place = new Map(order.map((cluster, index) => [cluster, index]));
  const fresh = [...sizes.keys()].filter((cluster) => !place.has(cluster));
  for (const cluster of fresh.sort((one, other) => one - other)) {
    let [total, clients] = [0, 0];
    for (const [from, to, number] of flows) {
      if (to === cluster && place.has(from) && !fresh.includes(from)) {
        total += place.get(from) * number;
        clients += number;
      }
    }
    place.set(cluster, clients ? total / clients : order.length);
  }
  return [...place.keys()]
    .filter((cluster) => sizes.has(cluster))
    .sort((one, other) => place.get(one) - place.get(other) || one - other);
}

function gapOf(size) {
  return Math.max(size < 20 ? 0.4 : 1, GAP * size);
}

function bandsOf(order, sizes, all) {
  const gap = gapOf(all);
  const total = order.reduce((sum, cluster) => sum + sizes.get(cluster), 0);
  let top = -(total + gap * (order.length - 1)) / 2;
  const bands = new Map();
  for (const cluster of order) {
    bands.set(cluster, [top, sizes.get(cluster)]);
    top += sizes.get(cluster) + gap;
  }
  return bands;
}

/** Return the heights between which all bands lie. */
export function extent(epochs) {
  let [low, high] = [Infinity, -Infinity];
  for (const { bands } of epochs) {
    for (const [top, size] of bands.values()) {
      low = Math.min(low, top);
      high = Math.max(high, top + size);
    }
  }
  return low < high ? [low, high] : [0, 1];
}

/**
 * Return the parts of the bands that flow into an epoch: [from, to, top before, top after, size].
 * Parts leave and arrive in the order of the clusters on the other side, so that they do not cross.
 */
export function partsInto(before, epoch) {
  const moved = epoch.flows.filter(([from]) => from >= 0);
  const leaving = new Map();
  const arriving = new Map();
  for (const [from, to, clients] of epoch.flows) {
    count(leaving, from, clients);
    count(arriving, to, clients);
  }
  const parts = [...moved];
  for (const [cluster, [, size]] of before) {
    const stays = size - (leaving.get(cluster) ?? 0);
    if (stays > 0) parts.push([cluster, cluster, stays]);
  }
  const top = (bands, cluster) => bands.get(cluster)?.[0] ?? 0;
  const starts = new Map([...before].map(([cluster, [y]]) => [cluster, y]));
  const stops = new Map([...epoch.bands].map(([cluster, [y]]) => [cluster, y]));
  const found = parts.map(([from, to, clients]) => ({ from, to, clients, begins: 0, ends: 0 }));
  for (const part of sorted(found, (one) => top(epoch.bands, one.to))) {
    part.begins = starts.get(part.from) ?? 0;
    starts.set(part.from, part.begins + part.clients);
  }
  for (const part of sorted(found, (one) => top(before, one.from))) {
    part.ends = stops.get(part.to) ?? part.begins;
    stops.set(part.to, part.ends + part.clients);
  }
  return found;
}

function sorted(parts, key) {
  return [...parts].sort((one, other) => key(one) - key(other));
}
