/* The browser of samples. Every text comes in as textContent, so that nothing a policy writes becomes markup. */
const sampleView = { filters: {}, chosen: null, more: 1 };
const SAMPLES_A_PAGE = 50;
const TURN = /<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n|(\[INST\])|(\[\/INST\])/g;
const TURN_END = /(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>)\s*$/;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function rounded(value) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(3)));
}

function startSamples() {
  const data = document.getElementById("sample-data");
  if (!data) return;
  const samples = JSON.parse(data.textContent);
  const fields = [...document.querySelectorAll("#filters input, #filters select")];
  const finish = fields.find((field) => field.name === "finish");
  for (const reason of new Set(samples.map((sample) => sample.finish))) {
    if (reason) finish.append(new Option(reason, reason));
  }
  if (!samples.some((sample) => sample.token_log_prob_diffs.length)) document.querySelector("#filters option[value=diff]").disabled = true;
  for (const field of fields) {
    if (field.name in sampleView.filters) field.value = sampleView.filters[field.name];
    field.addEventListener("input", () => {
      sampleView.filters[field.name] = field.value;
      sampleView.more = 1;
      listSamples(samples);
      showSample(samples);
    });
  }
  listSamples(samples);
  showSample(samples);
}

function keyOf(sample) {
  return `${sample.rollout} ${sample.step} ${sample.row}`;
}

function isWithin(value, name) {
  const [least, most] = ["least", "most"].map((end) => sampleView.filters[`${name}-${end}`] ?? "");
  if (value === null) return least === "" && most === "";
  return (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
}

function foundSamples(samples) {
  const { kind = "", finish = "", text = "", sort = "newest" } = sampleView.filters;
  const wanted = text.toLowerCase();
  const found = samples.filter((sample) =>
    isWithin(sample.step, "step") && isWithin(sample.reward, "reward") && isWithin(sample.response_tokens, "tokens") &&
    isWithin(sample.version_min, "version") && isWithin(sample.version_max, "version") && (finish === "" || sample.finish === finish) &&
    (kind === "" || (sample.kind ?? "training") === kind) &&
    (wanted === "" || `${sample.prompt}\n${sample.response}`.toLowerCase().includes(wanted)));
  const orders = {
    newest: (a, b) => b.step - a.step || a.row - b.row,
    oldest: (a, b) => a.step - b.step || a.row - b.row,
    best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
    longest: (a, b) => b.response_tokens - a.response_tokens,
    shortest: (a, b) => a.response_tokens - b.response_tokens,
    off: (a, b) => Math.abs(b.log_prob_diff ?? 0) - Math.abs(a.log_prob_diff ?? 0),
  };
  return found.sort(orders[sort]);
}

function listSamples(samples) {
  const found = foundSamples(samples);
  document.getElementById("found").textContent = `${found.length} of ${samples.length} samples`;
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const [name, number] of [["step", 1], ["row", 1], ["reward", 1], ["advantage", 1], ["tokens", 1], ["version", 1], ["ended", 0], ["response", 0]]) {
    head.append(element("th", number ? "n" : "", name));
  }
  const body = table.createTBody();
  const shown = found.slice(0, sampleView.more * SAMPLES_A_PAGE);
  if (!shown.some((sample) => keyOf(sample) === sampleView.chosen)) sampleView.chosen = shown.length ? keyOf(shown[0]) : null;
  for (const sample of shown) {
    const row = body.insertRow();
    row.tabIndex = 0;
    row.dataset.key = keyOf(sample);
    const versions = sample.version_min === sample.version_max ? sample.version_max : `${sample.version_min}–${sample.version_max}`;
    for (const value of [sample.step, sample.row, rounded(sample.reward), rounded(sample.advantage), sample.response_tokens, versions]) {
      row.append(element("td", "n", value));
    }
    row.append(element("td", "", sample.finish));
    row.append(element("td", "snippet", sample.response.slice(0, 200).replace(/\s+/g, " ") || "no text"));
    const choose = () => {
      sampleView.chosen = row.dataset.key;
      markChosen();
      showSample(samples);
    };
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter") choose();
      const next = event.key === "ArrowDown" ? row.nextElementSibling : event.key === "ArrowUp" ? row.previousElementSibling : null;
      if (!next) return;
      event.preventDefault();
      next.focus();
      next.click();
    });
  }
  const list = document.getElementById("samples-list");
  list.replaceChildren(table);
  if (found.length > shown.length) {
    const more = element("button", "", `${found.length - shown.length} more`);
    more.type = "button";
    more.addEventListener("click", () => { sampleView.more += 1; listSamples(samples); });
    list.append(more);
  }
  markChosen();
}

function markChosen() {
  for (const row of document.querySelectorAll("#samples-list tbody tr")) row.classList.toggle("chosen", row.dataset.key === sampleView.chosen);
}

/* The value of each token by which it is coloured, and how far it is from none: -1 to 1. */
function colouring(sample) {
  const by = sampleView.filters.colour ?? "advantage";
  const values = { advantage: sample.token_advantages, diff: sample.token_log_prob_diffs, log_prob: sample.token_log_probs, version: sample.token_versions, none: [] }[by];
  const own = values.filter((value, place) => sample.token_policy[place] && value !== null);
  if (!own.length) return { by, values, most: 0, strength: () => 0 };
  if (by === "version") {
    const [oldest, newest] = [Math.min(...own), Math.max(...own)];
    return { by, values, most: newest, strength: (value) => (newest > oldest ? (2 * (value - oldest)) / (newest - oldest) - 1 : 1) };
  }
  const most = own.reduce((seen, value) => Math.max(seen, Math.abs(value)), 0);
  return { by, values, most, strength: (value) => (most && value !== null ? value / most : 0) };
}

function turnsOf(text, role) {
  const turns = [];
  let end = 0, name = role;
  const add = (until) => {
    const said = text.slice(end, until).replace(TURN_END, "");
    if (said.trim()) turns.push([name, said]);
  };
  for (const match of text.matchAll(TURN)) {
    add(match.index);
    name = match[1] ?? match[2] ?? match[3] ?? (match[4] ? "user" : "assistant");
    end = match.index + match[0].length;
  }
  add(text.length);
  return turns;
}

function turn(role, kind) {
  const made = element("div", `turn ${kind}`);
  made.append(element("div", "role", role));
  const said = element("div", "said");
  made.append(said);
  return [made, said];
}

function showSample(samples) {
  const place = document.getElementById("sample");
  const sample = samples.find((each) => keyOf(each) === sampleView.chosen);
  place.replaceChildren();
  if (!sample) return;
  place.append(element("h3", "", `Step ${sample.step}, row ${sample.row} of ${sample.rollout}${sample.kind === "evaluation" ? ", an evaluation" : ""}`));
  place.append(factsOf(sample));
  const colour = colouring(sample);
  place.append(legendOf(colour));
  const images = element("p", "images");
  for (const url of sample.images ?? []) {
    const image = element("img");
    image.alt = "an image of the conversation";
    if (url.startsWith("data:image/")) image.src = url;
    images.append(image);
  }
  if (images.childElementCount) place.append(images);
  for (const [role, said] of turnsOf(sample.prompt, "prompt")) {
    const [made, text] = turn(role, "asked");
    text.textContent = said;
    place.append(made);
  }
  for (const made of responseTurns(sample, colour)) place.append(made);
  const others = samples.filter((each) => each.group === sample.group && each.step === sample.step && each.rollout === sample.rollout && each !== sample);
  if (others.length) place.append(othersOf(others, samples));
}

function factsOf(sample) {
  const facts = element("p", "facts");
  const versions = sample.version_min === sample.version_max ? `version ${sample.version_max}` : `versions ${sample.version_min} to ${sample.version_max}`;
  const said = [
    `reward ${rounded(sample.reward)}`, `advantage ${rounded(sample.advantage)}`,
    `${sample.prompt_tokens} prompt tokens`, `${sample.response_tokens} tokens written`, versions,
    sample.finish && `ended by ${sample.finish}`, sample.log_prob_diff !== null && `log-probs differ by ${rounded(sample.log_prob_diff)}`,
    ...Object.entries(sample.columns).map(([name, value]) => `${name}: ${typeof value === "number" ? rounded(value) : value}`),
  ];
  for (const text of said) if (text) facts.append(element("span", "", text));
  return facts;
}

function legendOf(colour) {
  const legend = element("p", "legend");
  if (!colour.most && colour.by !== "version") {
    legend.textContent = colour.by === "none" ? "" : "every token's value is 0, or not known";
    return legend;
  }
  const ends = colour.by === "version" ? ["oldest version", "newest version"] : [`−${rounded(colour.most)}`, `+${rounded(colour.most)}`];
  legend.append(element("i", "token-low"), ends[0], element("i", "token-high"), ends[1]);
  return legend;
}

function responseTurns(sample, colour) {
  if (!sample.token_texts.length) {
    const [made, text] = turn("response", "wrote");
    text.textContent = sample.response || (sample.token_ids.length ? `token ids ${sample.token_ids.join(" ")}` : "no text was recorded");
    return [made];
  }
  const made = [];
  const turns = sample.token_policy.filter((own, place) => own && !sample.token_policy[place - 1]).length;
  let number = 0;
  for (let first = 0; first < sample.token_texts.length;) {
    const own = sample.token_policy[first];
    let end = first;
    while (end < sample.token_texts.length && sample.token_policy[end] === own) end += 1;
    if (own) {
      number += 1;
      const [each, text] = turn(turns > 1 ? turnWords(sample, first, end, `policy, turn ${number} of ${turns}`) : "policy", "wrote");
      for (let token = first; token < end; token += 1) text.append(tokenOf(sample, colour, token));
      made.push(each);
    } else {
      for (const [role, said] of turnsOf(sample.token_texts.slice(first, end).join(""), "tool")) {
        const [each, text] = turn(role, "told");
        text.textContent = said;
        made.push(each);
      }
    }
    first = end;
  }
  return made;
}

/* What a turn of a conversation was: its tokens, versions, and the reward of its environment. */
function turnWords(sample, first, end, name) {
  const [versions, rewards] = [sample.token_versions, sample.token_rewards ?? []].map((values) => values.slice(first, end));
  const reward = rewards.reduce((sum, value) => sum + (value ?? 0), 0);
  const told = [name, `${end - first} tokens`];
  if (versions.length && versions[0] !== versions[versions.length - 1]) told.push(`versions ${versions[0]} to ${versions[versions.length - 1]}`);
  if (rewards.length) told.push(`reward ${rounded(reward)}`);
  return told.join(" · ");
}

function tokenOf(sample, colour, place) {
  const token = element("span", "token", sample.token_texts[place]);
  const strength = colour.strength(colour.values[place] ?? 0);
  if (strength) token.style.background = `color-mix(in srgb, var(--token-${strength > 0 ? "high" : "low"}) ${Math.round(Math.abs(strength) * 70)}%, transparent)`;
  if (sample.token_trained.length && !sample.token_trained[place]) token.classList.add("untrained");
  const facts = { advantage: "token_advantages", "log-prob": "token_log_probs", difference: "token_log_prob_diffs", version: "token_versions" };
  const told = Object.entries(facts).filter(([, key]) => sample[key].length).map(([name, key]) => `${name} ${rounded(sample[key][place])}`);
  token.title = [`token ${place}, id ${sample.token_ids[place]}`, ...told].join("\n");
  return token;
}

function othersOf(others, samples) {
  const made = element("p", "muted", "Of the same prompt: ");
  for (const other of others) {
    const button = element("button", "", `row ${other.row}, reward ${rounded(other.reward)}`);
    button.type = "button";
    button.addEventListener("click", () => {
      sampleView.chosen = keyOf(other);
      markChosen();
      showSample(samples);
    });
    made.append(button, " ");
  }
  return made;
}
