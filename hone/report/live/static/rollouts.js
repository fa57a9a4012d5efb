// Every sampled answer: presets, filters, search, a table of any length, and a scatter of length and reward.

import { base, get } from "./api.js";
import { verdict } from "./answer.js";
import { choice, fill, h, link, none } from "./dom.js";
import { address, number, plural, signed, whole, words } from "./format.js";
import { Scatter } from "./scatter.js";
import { VirtualTable } from "./table.js";

const FIELDS = ["preset", "sort", "verdict", "level", "from", "to", "problem", "text"];

export async function page(context) {
  const query = Object.fromEntries(FIELDS.map((name) => [name, context.params.get(name) ?? ""]));
  if (context.state.stages.find((one) => one.name === context.stage)?.kind === "sft") {
    return fill(context.main, h("section.page", null, h("div.title", null, h("h1", null, "Rollouts")), none(context)));
  }
  const path = base(context.run, context.stage);
  const parameters = (more) => new URLSearchParams(Object.entries({ ...query, ...more }).filter(([, value]) => value !== "")).toString();
  const about = h("p.quiet", { "aria-live": "polite" });
  const presets = h("div.presets", { role: "group", "aria-label": "Presets" });
  const filters = h("div.controls");
  const picture = h("div.scatters");
  let last = null;

  const table = new VirtualTable({
    label: "Answers",
    columns: columns(context),
    fetch: async (start, count) => {
      last = await get(`${path}/rollouts?${parameters({ start, count })}`, context.signal);
      status();
      return last;
    },
    open: (row) => (location.hash = address(context.run, context.stage, "group", [row.step, row.group], { answer: row.index })),
    sorted: (key) => change({ sort: key }),
  });
  const scatter = new Scatter(picture, (point) => (location.hash = address(context.run, context.stage, "sample", [point.step, point.place])));

  function status() {
    const chosen = options.presets.find((one) => one.name === (query.preset || "all"));
    const busy = !last.whole && last.files ? ` Reading the run: ${whole(last.indexed)} of ${plural(last.files, "step")}.` : "";
    const sampled = last.files > 0 || context.state.stages.find((one) => one.name === context.stage)?.rollouts;
    table.say(last.whole ? "No answer is among these steps and filters." : sampled ? "Reading the run …" : "No answers yet. They appear with the first finished step.");
    about.textContent = `${plural(last.total, "answer")}. ${chosen?.about ?? ""}${busy}${last.trouble ? ` ${last.trouble}` : ""}`;
  }

  async function change(values) {
    Object.assign(query, values);
    context.replace(address(context.run, context.stage, "rollouts", [], query));
    table.heads(query.sort);
    bar();
    await Promise.all([load(), table.reload(), scatter.load(`${path}/points?${parameters()}`, context.signal)]);
  }

  let options = { presets: [], verdicts: {}, levels: [] };
  const reading = link("Read the first three", "", { class: "button" });
  function bar() {
    reading.href = address(context.run, context.stage, "read", [], query);
    fill(presets, options.presets.map((one) => h("button", {
      type: "button", "aria-pressed": String((query.preset || "all") === one.name), title: one.about,
      onclick: () => change({ preset: one.name === "all" ? "" : one.name, sort: "" }),
    }, one.title, h("span.count", null, whole(one.rows)))));
    if (filters.contains(document.activeElement)) return;
    fill(filters,
      h("label.field", null, h("span", null, "Search in answers"), h("input", { type: "search", value: query.text, placeholder: "text", id: "search",
        onchange: (event) => change({ text: event.target.value }) })),
      choice("Verdict", [["", "any"], ...Object.entries(options.verdicts).map(([name, n]) => [name, `${words(name)} (${whole(n)})`])], query.verdict, (value) => change({ verdict: value })),
      options.levels.length > 1 ? choice("Level", [["", "any"], ...options.levels.map((level) => [level, level])], query.level, (value) => change({ level: value })) : null,
      stepField("From step", "from"), stepField("to step", "to"),
      reading,
      FIELDS.some((name) => query[name]) ? h("button", { type: "button", onclick: () => change(Object.fromEntries(FIELDS.map((name) => [name, ""]))) }, "Clear") : null);
  }

  function stepField(label, name) {
    return h("label.field.short", null, h("span", null, label), h("input", { type: "number", min: 0, value: query[name], onchange: (event) => change({ [name]: event.target.value }) }));
  }

  fill(context.main, h("section.page.fill", null,
    h("div.title", null, h("h1", null, "Rollouts"), about), presets, filters, picture, table.element));
  table.heads(query.sort);
  const load = async () => {
    options = await get(`${path}/choices?${parameters()}`, context.signal);
    bar();
    if (last) status();
  };
  await Promise.all([load(), table.reload(), scatter.load(`${path}/points?${parameters()}`, context.signal)]);

  context.keys({
    "/": ["search", () => document.getElementById("search").focus()],
    j: ["next answer", () => table.move(1)],
    k: ["answer before", () => table.move(-1)],
    r: ["read the first three", () => (location.hash = address(context.run, context.stage, "read", [], query))],
    Enter: ["open the answer’s group", () => table.openActive()],
    p: ["next preset", () => {
      const at = options.presets.findIndex((one) => one.name === (query.preset || "all"));
      change({ preset: options.presets[(at + 1) % options.presets.length]?.name ?? "", sort: "" });
    }],
  });
  context.every(async () => {
    const now = await get(`${path}/rollouts?${parameters({ start: 0, count: 1 })}`, context.signal);
    if (now.version !== options.version) await load(); // they may have been asked for before the index knew anything
    if (now.version === last?.version && now.whole === last?.whole) return false;
    await table.reload(false);
    if (now.whole) await scatter.load(`${path}/points?${parameters()}`, context.signal);
  }, () => (last?.whole ? 3000 : 1000));
}

function columns(context) {
  const to = (row) => address(context.run, context.stage, "sample", [row.step, row.place]);
  return [
    { key: "step", title: "Step", sort: "step", class: "num narrow", cell: (row) => link([h("span.unit", null, "step "), whole(row.step)], to(row), { "aria-label": `Step ${row.step}, sample ${row.place}` }) },
    { key: "verdict", title: "Verdict", class: "mid", cell: (row) => verdict(row.verdict) },
    { key: "total", title: "Reward", sort: "total", class: "num", cell: (row) => [h("span.unit", null, "reward "), number(row.total)] },
    { key: "advantage", title: "Advantage", sort: "advantage", class: "num wide-only", cell: (row) => signed(row.advantage) },
    { key: "tokens", title: "Tokens", sort: "tokens", class: "num", cell: (row) => [whole(row.tokens), h("span.unit", null, " tokens")] },
    { key: "repetition", title: "Repeated", sort: "repetition", class: "num wide-only", cell: (row) => `${Math.round(100 * (row.repetition ?? 0))}%` },
    { key: "mismatch", title: "Mismatch", sort: "mismatch", class: "num wide-only", cell: (row) => number(row.mismatch, 2) },
    { key: "problem", title: "Problem", sort: "problem", class: "id wide-only", cell: (row) => row.problem },
    { key: "text", title: "End of the answer", class: "rest", cell: (row) => h("bdi", { dir: "ltr" }, row.text) }, // cut on its left, by the style
  ];
}
