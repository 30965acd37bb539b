// Numbers and names as people read them, and elements that hold them.

/** Make an element. Children are elements or texts: nothing is ever read as markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

/**
 * Give an element children. Those that are as they were stay: one that a mouse is pressed on, or
 * that has the focus, must not be taken away because something else has changed.
 */
export function refill(element, ...children) {
  const held = [...element.childNodes];
  children.forEach((child, index) => {
    const old = held[index];
    if (!old) element.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  for (const old of held.slice(children.length)) old.remove();
}

/** Make an element for a name that a client has chosen: it changes nothing around it. */
export function nameElement(name) {
  return make("bdi", { title: name }, name.length > 80 ? `${name.slice(0, 80)}…` : name);
}

const MINUTES_OF_DAY = 1440;

/** Return the number of seconds in the unit that suits a span of time, and its symbol. */
export function timeUnit(span) {
  if (span > 2 * 86400) return [86400, "d"];
  if (span > 5 * 3600) return [3600, "h"];
  if (span > 1.5 * 3600) return [60, "min"];
  return [1, "s"];
}

export function timeText(time, span) {
  const [seconds, unit] = timeUnit(span);
  if (unit === "d") {
    // "29.4 d" would be a matter of hours.
    const minutes = Math.floor(time / 60);
    const of = (value) => String(Math.floor(value)).padStart(2, "0");
    return `${number(Math.floor(minutes / MINUTES_OF_DAY))} d ` +
      `${of((minutes % MINUTES_OF_DAY) / 60)}:${of(minutes % 60)}`;
  }
  const digits = span / seconds < 10 ? 2 : span / seconds < 1000 ? 1 : 0;
  return `${number(time / seconds, digits)} ${unit}`;
}

const formats = new Map(); // To make one takes longer than to use it.

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (!formats.has(digits)) {
    const both = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(digits, new Intl.NumberFormat("en", both));
  }
  return formats.get(digits).format(value);
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

// What Flower's error codes mean.
const ERRORS = [
  "device error", "the device could not load its app", "the device's app raised an exception",
  "the task was lost before the device fetched it", "the reply was lost or unreadable",
  "the device went offline", "the device's app refused the task", "the device's app is invalid",
  "the device's app crashed",
];

/** Return why an update was rejected, with Flower's error codes in words. */
export function reasonText(reason) {
  const [, code, rest] = /^error (\d+): ?([^]*)$/.exec(reason) ?? [];
  if (code === undefined) return reason;
  const more = rest && rest !== "no reason given" ? `: ${rest}` : "";
  return `${ERRORS[code] ?? ERRORS[0]}${more}`;
}
