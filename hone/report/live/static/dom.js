// Elements without markup: text from a run only ever becomes a text node.

/** h("p", {class: "quiet", onclick: f}, "text", child, [more]): an element. A false or null attribute or child is left out. */
export function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = [element.className, value].filter(Boolean).join(" ");
    else if (key === "value" || key === "checked" || key === "selected") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replaces everything in an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export function link(text, href, attributes) {
  return h("a", { href, ...attributes }, text);
}

/** What a page about answers says of a stage that has none. */
export function none(context) {
  const stage = context.state.stages.find((one) => one.name === context.stage);
  return h("p.empty", null, stage?.kind === "sft" ? "A supervised stage samples no answers: it learns from given ones." :
    stage?.rollouts ? "Reading the run …" : "No answers yet. They appear with the first finished step.");
}

/** A labelled <select>. `options`: [value, text] pairs. */
export function choice(label, options, value, changed) {
  const select = h("select", { onchange: () => changed(select.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label.field", null, h("span", null, label), select);
}

/** One of a few, as buttons beside each other. */
export function segments(label, options, value, changed) {
  const buttons = options.map(([key, text, title]) =>
    h("button", { type: "button", "aria-pressed": String(key === value), title, onclick: () => pick(key) }, text));
  const group = h("div.segments", { role: "group", "aria-label": label }, buttons);
  function pick(key) {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === key)));
    changed(key);
  }
  group.pick = pick;
  return group;
}

let timer = 0;
/** A short message at the bottom of the page. */
export function toast(text) {
  const place = document.getElementById("toast");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(timer);
  timer = setTimeout(() => place.classList.remove("shown"), 2600);
}
