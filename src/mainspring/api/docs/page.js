"use strict";

// Everything is put in as text, never as markup: a summary cannot become a script.
function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function resolved(schema, all, depth = 0) {
  if (!schema || depth > 4) return schema;
  if (schema.$ref) return resolved(all[schema.$ref.split("/").pop()], all, depth + 1);
  return schema;
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.type === "array") return `${typeOf(schema.items)}[]`;
  return schema.type || "any";
}

function table(rows) {
  const body = element("tbody");
  for (const row of rows) body.append(element("tr", "", ...row.map((cell) => element("td", cell))));
  return element("table", "", body);
}

function shape(title, schema, all) {
  const whole = resolved(schema, all);
  const part = element("div", "", element("h4", title));
  if (whole && whole.description) part.append(element("p", whole.description));
  if (whole && whole.properties) {
    const needed = whole.required || [];
    part.append(table(Object.entries(whole.properties).map(([name, one]) => [
      name + (needed.includes(name) ? "" : "?"), typeOf(one), one.default === undefined ? "" : `default ${JSON.stringify(one.default)}`,
    ])));
  } else if (whole) {
    part.append(element("pre", typeOf(schema)));
  }
  return part;
}

function operation(method, path, told, all) {
  const head = element("summary", "", element("b", method.toUpperCase()), element("code", path));
  head.append(element("span", told["x-right"] ? `needs: ${told["x-right"]}` : "open"));
  head.lastChild.className = "right";
  const box = element("details", "", head, element("p", told.summary));
  if (told.parameters) {
    box.append(element("h4", "Parameters"));
    box.append(table(told.parameters.map((one) => [one.name + (one.required ? "" : "?"), one.in, typeOf(one.schema)])));
  }
  if (told.requestBody) {
    const [kind, content] = Object.entries(told.requestBody.content)[0];
    box.append(shape(`Body (${kind})`, content["x-line-schema"] || content.schema, all));
  }
  for (const [status, answer] of Object.entries(told.responses)) {
    const [kind, content] = Object.entries(answer.content || {})[0] || ["", {}];
    if (status < "300") box.append(shape(`${status} (${kind})`, content["x-line-schema"] || content.schema, all));
    else box.append(element("p", `${status}  ${answer.description}`));
  }
  box.dataset.text = `${method} ${path} ${told.summary}`.toLowerCase();
  return box;
}

async function show() {
  const api = await (await fetch("/openapi.json")).json();
  document.getElementById("version").textContent = api.info.version;
  document.getElementById("about").textContent = api.info.description;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, told] of Object.entries(methods)) {
      if (!groups.has(told.tags[0])) groups.set(told.tags[0], element("section", "", element("h2", told.tags[0])));
      groups.get(told.tags[0]).append(operation(method, path, told, api.components.schemas));
    }
  }
  document.getElementById("operations").append(...groups.values());
}

document.getElementById("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  for (const box of document.querySelectorAll("details")) box.hidden = !box.dataset.text.includes(wanted);
});
show();
