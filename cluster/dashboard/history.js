// Draws the last fifteen minutes, which the server keeps, with uPlot.

import { byId, make, setText } from "./dom.js";
import { bytes, percent, seconds, threeDigits } from "./format.js";

const SPAN_S = 900;
const SPAN_MIN_S = 60; // of a server that has just started
const HEIGHT_PX = 150;
const AXIS_PX = 62;
const CLASSES = ["pages_live", "pages_cached", "states_live", "states_cached", "windows_live", "windows_cached", "checkpoints_live", "checkpoints_cached", "free", "empty", "unmapped"];
const MARKS = { start: "--good", end: "--bad" };

const uPlot = globalThis.uPlot;
const drawn = new Map(); // by the title of a chart
let marks = []; // of the shown models

const percentiles = (name, quantiles) =>
  quantiles.map((share, index) => ({ label: `p${share * 100}`, of: (row) => row[name][index], color: index ? "--warn" : "--accent" }));

// Returns the charts. The series of a stack are drawn on top of each other, the first one at the bottom.
function chartsOf(history) {
  return [
    { title: "Generated tokens/s", format: threeDigits, series: [{ label: "tokens/s", of: (row) => row.tokens_per_s, color: "--accent" }] },
    { title: "Hit ratio of prompts", format: percent, series: [{ label: "hits", of: (row) => row.hit_ratio, color: "--accent" }] },
    { title: "Time to first token", format: seconds, series: percentiles("ttft_s", history.quantiles) },
    { title: "Time between tokens", format: seconds, series: percentiles("itl_s", history.quantiles) },
    {
      title: "Memory of all workers",
      format: bytes,
      stacked: true,
      series: CLASSES.map((name) => ({ label: name.replace("_", " "), of: (row) => row.memory[name] ?? 0, color: `--${name.replace("_", "-")}` })),
    },
  ];
}

function colorOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Returns the columns that are drawn, and those that the legend shows. Those of a stack are sums from the top
// of the stack to its bottom, so that each area covers the lower part of the one before.
function columnsOf(chart, rows) {
  const own = chart.series.map((series) => rows.map(series.of));
  if (!chart.stacked) return { shown: own, own };
  const sums = own.map((_, top) => rows.map((_, at) => own.slice(0, top + 1).reduce((sum, column) => sum + column[at], 0)));
  return { shown: sums.reverse(), own: own.reverse() };
}

function drawMarks(plot) {
  const { ctx } = plot;
  const { top, height } = plot.bbox;
  ctx.save();
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at_s, "x", true));
    if (x < plot.bbox.left) continue;
    ctx.fillStyle = colorOf(MARKS[mark.kind]);
    ctx.fillRect(x, top, 2 * devicePixelRatio, height);
  }
  ctx.restore();
}

function open(chart, figure) {
  const axis = { stroke: colorOf("--quiet"), grid: { stroke: colorOf("--rule"), width: 1 }, ticks: { show: false } };
  const series = chart.stacked ? [...chart.series].reverse() : chart.series;
  const state = { own: [] };
  const options = {
    width: figure.clientWidth,
    height: HEIGHT_PX,
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [axis, { ...axis, size: AXIS_PX, values: (_, ticks) => ticks.map(chart.format) }],
    series: [
      { label: "at" },
      ...series.map((one, index) => ({
        label: one.label,
        stroke: colorOf(one.color),
        fill: chart.stacked ? colorOf(one.color) : undefined,
        width: chart.stacked ? 0 : 1.5,
        points: { show: false },
        value: (_, value, __, at) => (at === null || value === null ? "–" : chart.format(state.own[index][at])),
      })),
    ],
    hooks: { draw: [drawMarks] },
  };
  state.plot = new uPlot(options, [[]], figure);
  new ResizeObserver(() => state.plot.setSize({ width: figure.clientWidth, height: HEIGHT_PX })).observe(figure);
  return state;
}

// Draws the rows of a model; the empty name is that of all models.
export function drawHistory(history, model) {
  const rows = history.models[model] ?? [];
  marks = history.marks.filter((mark) => model === "" || mark.model === model);
  const now_s = rows.at(-1)?.at_s ?? Date.now() / 1000;
  const first_s = Math.max(now_s - SPAN_S, Math.min(rows[0]?.at_s ?? now_s, now_s - SPAN_MIN_S));
  const starts = marks.filter((mark) => mark.kind === "start").length;
  setText(byId("history-marks"), `${starts} starts and ${marks.length - starts} ends of workers, drawn as lines`);
  for (const chart of chartsOf(history)) {
    if (!drawn.has(chart.title)) {
      const figure = document.createElement("figure");
      figure.append(make("figcaption", chart.title));
      byId("history").append(figure);
      drawn.set(chart.title, open(chart, figure));
    }
    const state = drawn.get(chart.title);
    const { shown, own } = columnsOf(chart, rows);
    state.own = own;
    state.plot.setData([rows.map((row) => row.at_s), ...shown], false);
    state.plot.setScale("x", { min: first_s, max: now_s });
  }
}

// Forgets the charts, whose colors are those of a color scheme.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of drawn.values()) plot.destroy();
  drawn.clear();
  byId("history").replaceChildren();
});
