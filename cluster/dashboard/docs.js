// Draws openapi.json: each path with its methods, parameters, and the fields of its body.

import { ask, holdKey, Refused } from "./api.js";
import { byId, make, setText, show } from "./dom.js";

const SUCCESS = /^2/;

// Returns the type of a JSON schema in a few words.
function typeOf(schema, document_) {
  const known = resolved(schema, document_);
  if (known.enum || "const" in known) return (known.enum ?? [known.const]).map((one) => JSON.stringify(one)).join(", ");
  const either = known.anyOf ?? known.oneOf;
  if (either) return either.map((one) => typeOf(one, document_)).join(" or ");
  if (known.type === "array") return `list of ${typeOf(known.items ?? {}, document_)}`;
  if (schema.$ref) return schema.$ref.split("/").pop();
  return [known.type ?? "any"].flat().join(" or ");
}

function resolved(schema, document_) {
  const name = schema.$ref?.split("/").pop();
  return name ? (document_.components.schemas[name] ?? {}) : schema;
}

function rangeOf(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const range = low === undefined && high === undefined ? "" : `${low ?? ""} to ${high ?? ""}`;
  const standard = schema.default === undefined || schema.default === null ? "" : `default ${JSON.stringify(schema.default)}`;
  return [range, standard].filter(Boolean).join("; ");
}

function tableOf(caption, rows) {
  const table = document.createElement("table");
  table.append(make("caption", caption));
  const body = document.createElement("tbody");
  for (const cells of rows) {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => make("td", cell)));
    body.append(row);
  }
  table.append(body);
  return table;
}

function sectionOf(path, method, operation, document_) {
  const section = document.createElement("section");
  section.append(make("h2", `${method.toUpperCase()} ${path}`), make("p", operation.description ?? ""));
  const row = (name, needed, schema, text) => [name + (needed ? " (required)" : ""), typeOf(schema, document_), rangeOf(resolved(schema, document_)), text ?? schema.description ?? ""];
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    section.append(tableOf("Parameters", parameters.map((one) => row(one.name, one.required, one.schema, one.description))));
  }
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) {
    const fields = resolved(body, document_);
    const needed = new Set(fields.required ?? []);
    section.append(tableOf("Body", Object.entries(fields.properties ?? {}).map(([name, schema]) => row(name, needed.has(name), schema))));
  }
  const replies = Object.entries(operation.responses).filter(([status]) => SUCCESS.test(status));
  const kinds = replies.flatMap(([, reply]) => Object.keys(reply.content ?? {}));
  section.append(make("p", `Reply: ${kinds.join(" or ") || "empty"}`, "quiet"));
  return section;
}

async function draw() {
  try {
    const document_ = await ask("openapi.json");
    setText(byId("server"), `version ${document_.info.version}`);
    const sections = Object.entries(document_.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => sectionOf(path, method, operation, document_)),
    );
    byId("operations").replaceChildren(...sections);
    show(byId("key-form"), false);
    show(byId("docs-error"), false);
  } catch (error) {
    show(byId("key-form"), error instanceof Refused && error.status === 401);
    setText(byId("docs-error"), error.message);
    show(byId("docs-error"), true);
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  holdKey(byId("key").value.trim());
  byId("key").value = "";
  draw();
});
draw();
