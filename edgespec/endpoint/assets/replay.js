// The timeline of an answer: drafts, passes and tokens on four lanes, to play or to step through.

const LANES = [["draft", "draft steps"], ["send", "nodes sent"], ["pass", "passes"], ["commit", "tokens"]];
const REPLAY_TICK_MS = 50;

/** Return the element that shows the timeline of a message. */
function replayOf(message) {
  const moments = message.moments, runs = message.runs.content;
  const commits = [];
  let token = 0;
  for (const one of moments) {
    if (one.kind !== "commit") continue;
    commits.push({ at: one.at_s, first: token, last: Math.min(token += one.count, runs.length) });
  }
  const begin = Math.min(...moments.map(one => one.at_s - (one.took_s || 0)), 0);
  const end = Math.max(...moments.map(one => one.at_s), 0.001);
  const canvas = make("canvas", { role: "img", "aria-label": "Draft steps, nodes sent, passes and tokens of this answer over time" });
  const slider = make("input", { type: "range", min: begin, max: end, step: "any", value: end, "aria-label": "Time" });
  const clock = make("span", { class: "soft" }), text = make("div", { class: "text", tabindex: "0", "aria-label": "Text up to this time" });
  const play = make("button", { type: "button", class: "quiet" }, "Play");
  const back = make("button", { type: "button", class: "quiet" }, "Step back"), step = make("button", { type: "button", class: "quiet" }, "Step");
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let now = end, timer = null, shown = -1;

  function show(at) {
    now = at;
    slider.value = at;
    clock.textContent = `${number(at, 2)} of ${number(end, 2)} s`;
    draw();
    const last = commits.filter(one => one.at <= at + 1e-9).at(-1)?.last ?? 0;
    if (last === shown) return;
    shown = last;
    let place = 0;
    text.replaceChildren(...runs.slice(0, last).map(([origin, length]) => {
      return tokenPart(origin, message.content.slice(place, place += length));
    }));
    text.scrollTop = text.scrollHeight;
  }

  function draw() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d"), colours = {};
    const colour = name => colours[name] ||= resolveColour(name);
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const left = 74, foot = 18, lane = (height - foot) / LANES.length;
    const x = at => left + (width - left - 6) * (at - begin) / (end - begin || 1);
    LANES.forEach(([, name], index) => {
      pen.fillStyle = colour("--soft");
      pen.fillText(name, 0, lane * (index + 0.5));
      pen.fillStyle = colour("--line");
      pen.fillRect(left, lane * (index + 1) - 1, width - left, 1);
    });
    pen.fillStyle = colour("--soft");
    pen.fillText("0 s", left, height - 7);
    pen.textAlign = "right";
    pen.fillText(number(end, 2) + " s", width, height - 7);
    pen.textAlign = "left";
    let commit = 0;
    for (const one of moments) {
      const first = one.kind === "commit" ? commits[commit++] : null;
      if (one.at_s - (one.took_s || 0) > now) continue;
      const index = LANES.findIndex(([kind]) => kind === one.kind);
      const top = lane * index + 3, room = lane - 7, at = x(Math.min(one.at_s, now));
      if (one.kind === "link") {
        pen.fillStyle = colour(one.count ? "--good" : "--bad");
        pen.fillRect(at - 1, 0, 2, lane * LANES.length);
      } else if (one.kind === "draft" || one.kind === "pass") {
        const from = x(one.at_s - (one.took_s || 0));
        pen.fillStyle = colour(one.kind === "draft" ? "--draft" : "--lookup");
        pen.fillRect(from, top, Math.max(1.5, at - from - 0.5), room);
      } else if (one.at_s <= now && one.kind === "send") {
        pen.fillStyle = colour("--soft");
        const high = room * Math.min(1, 0.25 + one.count / 8);
        pen.fillRect(at - 1, top + room - high, 2, high);
      } else if (first && one.at_s <= now) {
        const each = Math.min(room / 2, Math.max(2, room / Math.max(1, first.last - first.first)));
        runs.slice(first.first, first.last).forEach(([origin], place) => {
          pen.fillStyle = colour({ prediction: "--prediction", "device model": "--model", "device lookup": "--lookup", server: "--server" }[origin] || "--target");
          pen.fillRect(at - 2, top + room - each * (place + 1), 4, each - 0.5);
        });
      }
    }
    pen.fillStyle = colour("--accent");
    pen.fillRect(x(now), 0, 1, height - foot);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  /** Return the time of the commit before or after now. */
  const commitAt = forward => {
    const times = commits.map(one => one.at);
    return forward ? times.find(at => at > now + 1e-9) ?? end : times.filter(at => at < now - 1e-9).at(-1) ?? begin;
  };
  play.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    play.textContent = "Pause";
    let last = performance.now();
    if (now >= end) show(begin);
    timer = setInterval(() => {
      const then = performance.now(), later = now + (then - last) / 1e3;
      last = then;
      // With reduced motion the picture changes only when tokens arrive.
      if (!isCalm || later >= commitAt(true)) show(Math.min(end, later));
      else now = later;
      if (now >= end || !canvas.isConnected) stop();
    }, REPLAY_TICK_MS);
  });
  step.addEventListener("click", () => { stop(); show(commitAt(true)); });
  back.addEventListener("click", () => { stop(); show(commitAt(false)); });
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  new ResizeObserver(() => show(now)).observe(canvas);
  return make("div", { class: "timeline" }, canvas, make("div", { class: "row" }, play, back, step, slider, clock), text);
}

/** Return the value of a custom property that is a colour, for the scheme in use. */
function resolveColour(name) {
  resolveColour.probe ||= document.body.appendChild(make("span", { hidden: true }));
  resolveColour.probe.style.color = `var(${name})`;
  return getComputedStyle(resolveColour.probe).color;
}
