// The colours of Raceme's figures: Okabe and Ito's, which people with any colour vision tell apart.

export const NEUTRAL = "#64748b";
export const PALETTE = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d46", "#5e3c99",
];
const SHADES_LIGHT = ["#1b1f24", "#8d99a6", "#4e5a66", "#c9d0d6", "#333b44", "#aab4bd", "#6d7985"];
const SHADES_DARK = ["#f2f4f6", "#8d99a6", "#c4ccd3", "#59646f", "#dbe0e5", "#737f8b", "#a8b2bc"];
// What would be lost on black is lighter there.
const LIGHTER = { "#64748b": "#8796ab", "#5e3c99": "#a48ade" };
const DASHES = [[], [7, 3], [2, 3], [8, 3, 2, 3]];

const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** Return whether the page is dark. */
export function isDark() {
  return dark.matches;
}

/** Call a function whenever the page becomes dark or light. */
export function onTheme(call) {
  dark.addEventListener("change", call);
}

function shown(colour) {
  return isDark() ? (LIGHTER[colour] ?? colour) : colour;
}

/** Return the colour of a cluster, the same in every figure. */
export function clusterColour(cluster) {
  return shown(cluster <= 0 ? NEUTRAL : PALETTE[(cluster - 1) % PALETTE.length]);
}

/** Return the colour and the dashes of one of several runs. */
export function seriesLook(index) {
  const dash = DASHES[Math.floor(index / PALETTE.length) % DASHES.length];
  return { colour: shown(PALETTE[index % PALETTE.length]), dash };
}

/** Return the shade of a true group; a client whose group is not known has none. */
export function groupColour(group) {
  const shades = isDark() ? SHADES_DARK : SHADES_LIGHT;
  return group < 0 ? "transparent" : shades[group % shades.length];
}

/** Return a colour that the style sheet names, as it is now. */
export function named(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
