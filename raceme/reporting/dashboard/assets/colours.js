// The colours of Raceme's figures: Okabe and Ito's, which people with any colour vision tell apart.

import { make } from "./words.js";

export const NEUTRAL = "#64748b";
export const PALETTE = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d46", "#5e3c99",
  "#c2185b", "#6b8e23", "#00838f", "#b026d3", "#3949ab", "#7f1d1d", "#1b5e20", "#7a86e0",
];
const SHADES_LIGHT = ["#1b1f24", "#8d99a6", "#4e5a66", "#c9d0d6", "#333b44", "#aab4bd", "#6d7985"];
const SHADES_DARK = ["#f2f4f6", "#8d99a6", "#c4ccd3", "#59646f", "#dbe0e5", "#737f8b", "#a8b2bc"];
// Colours with a contrast below 3 are lighter on black and darker on white.
const LIGHTER = {
  "#64748b": "#8796ab", "#5e3c99": "#a48ade", "#c2185b": "#ee5b90", "#3949ab": "#5f74f0",
  "#7f1d1d": "#c75f5f", "#1b5e20": "#5fb567", "#b026d3": "#d873ee",
};
const DARKER = { "#e69f00": "#b47c00", "#cc79a7": "#c06a98", "#56b4e9": "#2f93cc" };
const DASHES = [[], [7, 3], [2, 3], [8, 3, 2, 3]];

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let theme = "system";
dark.addEventListener("change", () => listeners.forEach((call) => call()));

/** Return whether the page is dark. */
export function isDark() {
  return theme === "system" ? dark.matches : theme === "dark";
}

/** Call a function whenever the page becomes dark or light. */
export function onTheme(call) {
  listeners.push(call);
}

/** Make the page light or dark, or as the system is: its rules for the dark hold or not. */
function setTheme(chosen) {
  theme = chosen;
  const media = { system: "(prefers-color-scheme: dark)", dark: "all", light: "not all" };
  for (const rule of [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])) {
    if (!(rule instanceof CSSMediaRule)) continue;
    rule.ofTheme ??= rule.media.mediaText.includes("prefers-color-scheme: dark");
    if (rule.ofTheme) rule.media.mediaText = media[theme];
  }
  document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  listeners.forEach((call) => call());
}

// Paper is white.
let before = theme;
window.addEventListener("beforeprint", () => {
  before = theme;
  setTheme("light");
});
window.addEventListener("afterprint", () => setTheme(before));

/** Return a choice of the theme. */
export function themeChoice() {
  const choice = make("select", { "aria-label": "Theme",
    onchange: () => setTheme(choice.value) },
  ...["system", "light", "dark"].map((name) => make("option", { value: name }, name)));
  choice.value = theme;
  return make("label", { class: "theme-choice" }, "theme ", choice);
}

function shown(colour) {
  return (isDark() ? LIGHTER : DARKER)[colour] ?? colour;
}

/** Return the colour of a cluster, the same in every figure. */
export function clusterColour(cluster) {
  return shown(cluster <= 0 ? NEUTRAL : PALETTE[(cluster - 1) % PALETTE.length]);
}

/** Return the dashes that tell clusters of one colour apart. */
export function clusterDash(cluster) {
  return DASHES[Math.floor(Math.max(0, cluster - 1) / PALETTE.length) % DASHES.length];
}

// Those of methods: blues that are hard to tell apart are left out.
const SERIES = PALETTE.filter((colour) => !["#56b4e9", "#3949ab", "#7a86e0"].includes(colour));

/** Return the colour and the dashes of one of several methods. */
export function seriesLook(index) {
  const dash = DASHES[Math.floor(index / SERIES.length) % DASHES.length];
  return { colour: shown(SERIES[index % SERIES.length]), dash };
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
