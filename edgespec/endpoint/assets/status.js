const POLL_MS = 1000, MOST_MS = 5000, SPAN_S = 10;
const setText = (id, text) => { element(id).textContent = text; };
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = value => value === null ? "–" : number(100 * value) + " %";
const ms = seconds => seconds === null ? "–" : number(1e3 * seconds, seconds < 0.01 ? 1 : 0) + " ms";
const mib = bytes => number(bytes / 1048576) + " MiB";
function duration(seconds) {
  if (seconds === null) return "";
  if (seconds < 90) return number(seconds) + " s";
  if (seconds < 5400) return number(seconds / 60) + " min";
  return number(seconds / 3600, seconds < 36000 ? 1 : 0) + " h";
}
const newElement = (tag, text, kind) => make(tag, { class: kind || null }, text);
const STATES = {
  unknown: ["not contacted yet", ""], connecting: ["connecting", ""], ready: ["ready", "good"],
  serving: ["serving", "good"], away: ["not reachable", "bad"],
  refuses: ["refuses this device", "bad"], misfit: ["serves another model", "bad"],
};
let events = [], lastEvent = 0, answeredAt = null, clockOffset = 0;
let gaps = [];  // times for which the agent kept no events: from, to, count

function showVerifiers(found) {
  const best = ["serving", "ready", "connecting"].map(
    state => found.find(one => one.state === state)).find(Boolean) || found[0];
  const [word, kind] = best ? STATES[best.state] : ["no verifier", "bad"];
  const since = best && kind === "bad" ? " for " + duration(best.since_s) : "";
  setText("state", best ? `${word}${since}: ${best.address}` : word);
  element("state").className = "pill " + kind;
  const there = best && kind !== "bad";
  setText("rtt", there ? ms(best.rtt_s) : "–");
  setText("pass", there && best.pass_s ? "pass " + ms(best.pass_s) : "");
  element("verifiers").replaceChildren(...found.map(one => {
    const row = document.createElement("li"), [words, how] = STATES[one.state];
    row.append(newElement("span", one.address), newElement("span", words + (one.since_s === null ||
      one.state === "unknown" ? "" : " for " + duration(one.since_s)), how));
    if (one.model) row.append(newElement("span", one.model, "soft"));
    if (one.max_sessions) row.append(
      newElement("span", `${one.sessions} of ${one.max_sessions} sessions`, "soft"));
    if (one.why && how === "bad") row.append(newElement("span", one.why, "soft"));
    if (one.drafts) row.append(...drafters(one.drafts));
    return row;
  }));
  element("drafters").hidden = !found.some(one => one.drafts && drafters(one.drafts).length);
}

function drafters(found) {
  const sources = [["devices", found.device_accepted, found.device_nodes],
    ["its draft model", found.model_accepted, found.model_nodes],
    ["its text lookup", found.text_accepted, found.text_nodes]].filter(one => one[2]);
  if (!sources.length) return [];
  const words = "accepted draft nodes: " + sources.map(([who, right, nodes]) =>
    `${number(right)} of ${number(nodes)} from ${who}`).join(", ");
  const steps = !found.model_steps ? "" : `; ${number(found.model_steps)} draft steps` + (
    found.model_us ? " of " + ms(found.model_us / 1e6 / found.model_steps) : "");
  const bar = newElement("span", "", "who");
  [[found.device_accepted, ""], [found.model_accepted + found.text_accepted, "served"]].forEach(
    ([right, kind]) => { bar.append(newElement("span", "", kind)); bar.lastChild.style.flexGrow = right; });
  const said = [newElement("span", words + steps, "soft"), bar];
  if (found.model_failures) said.push(newElement("span", "its draft model failed", "bad"));
  return said;
}

function showDrafting(found) {
  const words = found.worth === null ? "Not known yet:" : found.worth ? "Yes:" : "Not now:";
  setText("worth", words);
  setText("why", found.why + ".");
  setText("lead", found.lead);
  const verdict = document.querySelector(".verdict");
  verdict.className = "verdict" + (found.worth === null ? "" : found.worth ? " good" : " bad");
  const { tokens_per_s: now, plain_tokens_per_s: plain } = found;
  setText("times", now && plain ? number(now / plain, 2) + "×" : "–");
  setText("plain", now && plain ? `last answer: ${number(now, 1)} tokens/s, plain streaming an estimated ${number(plain, 1)}` : "not known yet");
}

function showEndpoint(found) {
  const base = new URL("v1", location.href).href, [first] = found.models;
  setText("base", base);
  const model = first ? first.name : "edgespec";
  const key = found.needs_key ? ' -H "Authorization: Bearer $EDGESPEC_ENDPOINT_KEY"' : "";
  const [path, prompt] = found.can_chat
    ? ["chat/completions", { messages: [{ role: "user", content: "Hello!" }] }] : ["completions", { prompt: "Once upon a time" }];
  const data = JSON.stringify({ model, max_tokens: 64, ...prompt });
  setText("curl", `curl ${base}/${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data.replaceAll("'", "'\\''")}'`);
  const call = found.can_chat
    ? `client.chat.completions.create(\n    model=${JSON.stringify(model)}, messages=[{"role": "user", "content": "Hello!"}]\n)\nprint(answer.choices[0].message.content)`
    : `client.completions.create(model=${JSON.stringify(model)}, prompt="Once upon a time")\nprint(answer.choices[0].text)`;
  const shown = found.needs_key ? 'os.environ["EDGESPEC_ENDPOINT_KEY"]' : '"none"';
  setText("python", `${found.needs_key ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key=${shown})\nanswer = ${call}`);
  setText("models", found.models.length === 0 ? "No verifier has reported its models yet." :
    "Models: " + found.models.map(one => `${one.name} (context ${one.context_length === null ? "not known" : number(one.context_length)}${one.parent ? ", adapter of " + one.parent : ""})`).join(", "));
  setText("busy", `${number(found.generations_running)} of ${number(found.max_concurrent)}`);
  setText("waiting", found.requests_waiting === 1 ? "1 request waits" : `${number(found.requests_waiting)} requests wait`);
  element("no-failures").hidden = found.failures.length > 0;
  element("failures").replaceChildren(...found.failures.map(one => make("li", {},
    make("span", {}, new Date(1e3 * one.at_s).toLocaleTimeString()), make("span", { class: "bad" }, String(one.status)),
    make("code", {}, one.path), make("span", {}, one.why), one.count > 1 ? make("span", { class: "soft" }, `${number(one.count)} times`) : null,
    make("small", { title: "Name of the request in the log" }, one.request_id))));
}

function showMemory(found) {
  const bar = element("bar"), budget = found.budget_bytes, share = found.resident_bytes / budget;
  bar.hidden = budget === null;
  if (budget === null) {
    setText("memory", mib(found.resident_bytes) + " in use; no budget is set (--memory-budget)");
    return;
  }
  element("held").style.width = Math.min(100, 100 * share) + "%";
  bar.classList.toggle("full", share > 0.97);
  bar.setAttribute("aria-valuemax", budget);
  bar.setAttribute("aria-valuenow", found.resident_bytes);
  const draft = found.resting ? "; drafting is paused by the memory guard" : found.window === null ? "" :
    `; the draft may cache ${number(found.window)} tokens and make ${found.width} nodes per step`;
  setText("memory", `${mib(found.resident_bytes)} of ${mib(budget)}${draft}`);
}

function showGenerations(found, running) {
  element("none").hidden = running > 0;
  element("table").hidden = running === 0;
  setText("running", running === 1 ? "1 generation running" : running + " generations running");
  element("generations").replaceChildren(...found.map(one => {
    const row = document.createElement("tr");
    const lossy = one.rule === "exact" ? "" : ` LOSSY (${one.rule})`;
    row.append(...["#" + one.number, (one.model || "–") + lossy, one.link.replace("_", " "),
      number(one.tokens), one.tokens_per_s === null ? "–" : number(one.tokens_per_s, 1),
      percent(one.acceptance), one.drafting ? "yes" : "no"].map(text => newElement("td", text)));
    return row;
  }));
}

function showTotals(found) {
  const rows = [["generations", found.generations], ["failed generations", found.failed],
    ["prompt tokens", found.prompt_tokens], ["tokens", found.tokens],
    ["tokens drafted on this device", found.accepted],
    ["of these from predictions", `${number(found.predicted_accepted)} of ${number(found.predicted_sent)} nodes`], ["corrected tokens", found.corrected],
    ["draft steps", found.steps], ["draft nodes sent", found.sent],
    ["acceptance rate", found.tried ? percent(found.hits / found.tried) : "–"],
    ["passes", found.passes], ["reconnects", found.reconnects]];
  element("totals").replaceChildren(...rows.map(([name, count]) => {
    const row = document.createElement("div");
    row.append(newElement("dt", name), newElement("dd", typeof count === "number" ? number(count) : count));
    return row;
  }));
}

const LANES = ["draft", "send", "pass", "commit"];
const NAMES = ["drafts", "sent", "passes", "commits"];

function drawTimeline() {
  const canvas = element("timeline"), ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  const left = 72, foot = 20, lane = (height - foot) / LANES.length, now = performance.now() / 1e3 + clockOffset;
  const x = at => left + (width - left - 8) * (1 - (now - at) / SPAN_S);
  pen.textBaseline = "middle";
  LANES.forEach((name, index) => {
    pen.fillStyle = css("--soft");
    pen.textAlign = "left";
    pen.fillText(NAMES[index], 10, lane * (index + 0.5));
    pen.fillStyle = css("--line");
    pen.fillRect(left, lane * (index + 1) - 1, width - left - 8, 1);
  });
  pen.fillStyle = css("--soft");
  const step = width < 480 ? 5 : 2;
  for (let second = 0; second <= SPAN_S; second += step) {
    pen.textAlign = second === 0 ? "right" : second === SPAN_S ? "left" : "center";
    pen.fillText(second === 0 ? "now" : `−${second} s`, x(now - second), height - foot / 2);
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left - 8, height - foot);
  pen.clip();
  for (const gap of gaps) {
    pen.fillStyle = css("--line");
    pen.fillRect(x(gap.from), 0, x(gap.to) - x(gap.from), height - foot);
  }
  for (const one of events) drawEvent(pen, one, x, lane);
  pen.restore();
}

function drawEvent(pen, one, x, lane) {
  const index = LANES.indexOf(one.kind), end = x(one.at_s), mean = one.count / one.events;
  if (one.kind === "link") {
    pen.fillStyle = css(one.count ? "--good" : "--bad");
    pen.fillRect(end - 1, 0, 2, lane * LANES.length);
    return;
  }
  const top = lane * index + 5, room = lane - 10;
  if (one.kind === "draft" || one.kind === "pass") {
    const begin = x(one.at_s - one.took_s);
    pen.fillStyle = css(one.kind === "draft" ? "--draft" : "--pass");
    pen.fillRect(begin, top, Math.max(1.5, end - begin - 0.5), room);
  } else if (one.kind === "send") {
    const high = room * Math.min(1, 0.25 + mean / 8);
    pen.fillStyle = css("--send");
    pen.fillRect(end - 1, top + room - high, 2, high);
  } else {
    const high = room * Math.min(1, mean / 8);
    let foot = top + room;
    for (const [name, count] of [["accepted", one.accepted], ["served", one.served],
      ["decoded", one.count - one.accepted - one.served]]) {
      const part = high * count / one.count;
      foot -= part;
      pen.fillStyle = css("--" + name);
      pen.fillRect(end - 2, foot, 4, part);
    }
  }
}

function show(found) {
  clockOffset = found.clock_s - performance.now() / 1e3;
  if (found.last_event < lastEvent) events = gaps = [];
  if (found.lost_events) gaps = gaps.concat({ count: found.lost_events, to: found.events[0].at_s,
    from: events.length ? events[events.length - 1].at_s : found.clock_s - found.uptime_s });
  gaps = gaps.filter(one => one.to > found.clock_s - SPAN_S);
  const lost = gaps.reduce((sum, one) => sum + one.count, 0);
  setText("lost", lost ? `${number(lost)} events were not kept: nothing is known of the shaded time.` : "");
  lastEvent = found.last_event;
  events = events.concat(found.events).filter(one => one.at_s > found.clock_s - SPAN_S - 1);
  setText("speed", number(found.tokens_per_s, 1));
  element("numbers").hidden = false;
  if (found.endpoint) showEndpoint(found.endpoint);
  showVerifiers(found.verifiers);
  showDrafting(found.drafting);
  showMemory(found.memory);
  showGenerations(found.generations, found.running);
  showTotals(found.totals);
  drawTimeline();
  setText("version", `edgespec ${found.version}, up for ${duration(found.uptime_s)}` +
    (found.draft ? `, draft ${found.draft} (${found.policy})` : ", without a draft") +
    (found.translated_share == null ? "" :
      `, translated: ${Math.round(100 * found.translated_share)} % of the target's words are its words`));
}

function showTrouble(text, state = "no answer from the agent") {
  element("trouble").hidden = !text;
  setText("trouble", text);
  if (text) {
    setText("state", state);
    element("state").className = "pill bad";
  }
}

// A browser logs every 401 in its console, so the numbers are fetched only once the key is known to be
// right, and not again before another one is entered.
let refused = false, isKnown = false;

async function poll() {
  if (!isKnown) {
    refused = (await askHealth()).needs_key;
    isKnown = !refused;
  }
  if (isKnown) {
    const answer = await fetch("status.json?after=" + lastEvent, {
      cache: "no-store", signal: AbortSignal.timeout(5000), headers: keyHeaders() });
    refused = answer.status === 401;
    isKnown = !refused;
    if (!refused && !answer.ok) throw new Error("the agent answered " + answer.status);
    if (!refused) show(await answer.json());
  }
  element("ask").hidden = !refused;
  if (refused) {
    showTrouble(sessionStorage.getItem(KEY) ? "This is not the API key of the endpoint." : "", "API key required");
    setText("state", "API key required");
    return;
  }
  answeredAt = performance.now();
  showTrouble("");
  document.documentElement.dataset.polled = 1 + Number(document.documentElement.dataset.polled || 0);
}

let wait = POLL_MS;

async function pollForEver() {
  try {
    if (!document.hidden && !refused) await poll();
    wait = POLL_MS;
  } catch (error) {
    isKnown = false;  // after a restart the key may be another one
    wait = Math.min(2 * wait, MOST_MS);
    const since = answeredAt === null ? "" : ` for ${duration((performance.now() - answeredAt) / 1e3)}`;
    showTrouble(`The agent has not answered${since}. The numbers below are its last ones.`);
  }
  setTimeout(pollForEver, wait);
}

document.addEventListener("visibilitychange", () => { wait = POLL_MS; });

element("ask").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value);
  element("key").value = "";
  refused = false;
});
addEventListener("resize", drawTimeline);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTimeline);
for (const name of ["base", "curl", "python"]) element("copy-" + name).append(copyButton(() => element(name).textContent));
drawTimeline();
pollForEver();
