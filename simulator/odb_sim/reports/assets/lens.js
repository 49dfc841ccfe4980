"use strict";
// Plays an epoch: see lens.py for the data. A round has five stages; each lane shows one rank, its samples as bars.
const DATA = JSON.parse(document.getElementById("data").textContent);
const STAGES = ["Windows fill", "Groups form", "Offers meet", "Steps align", "Steps are trained on"];
const get = id => document.getElementById(id);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const escape = text => String(text).replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");
const plural = (n, one, many) => n.toLocaleString("en") + " " + (n === 1 ? one : many || one + "s");
const seconds = s => (s < 0.9995 ? Math.round(1000 * s) + " ms" : s.toFixed(s < 99.5 ? 1 : 0) + " s");
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
const [first, stop] = DATA.played, last = (stop - first) * STAGES.length - 1;
const LANE = DATA.ranks.length > 8 ? 46 : 64, CARRY = 0.13, CARRIED = 22;
let at = 0, step = DATA.step, moved = 1, isPlaying = false, due = 0, before = 0, boxes = new Map();

const round = () => DATA.rounds[Math.floor(at / STAGES.length)];
const number = () => first + Math.floor(at / STAGES.length);
const stage = () => at % STAGES.length;
const firstStep = () => DATA.strip[number()].step;

/** Returns the length that is as high as a lane: that of the longest sample, but for a few that are far longer. */
function scale() {
  const here = round();
  if (!here.scale) {
    const lengths = here.parts.flatMap(part => (part ? part.lengths : [])).sort((a, b) => a - b);
    here.scale = Math.max(1, Math.min(lengths[lengths.length - 1] || 1, 1.25 * (lengths[Math.floor(0.98 * lengths.length)] || 1)));
  }
  return here.scale;
}

// Where the samples of a lane are --------------------------------------------------------------------------------------

/** Returns the box of each sample of a part in a stage, and what stands behind: groups with their padding, steps, idle ones. */
function place(part, stage, width) {
  const n = part.lengths.length, most = Math.max(1, ...round().parts.map(one => (one ? one.lengths.length : 0)));
  const high = LANE - 6, tall = length => Math.max(2, Math.min(high, (high * length) / scale())), boxes = new Array(n), behind = [];
  const groups = part.groups && stage < 3 ? part.groups : part.steps;
  if (stage === 0 || (stage < 3 && !part.groups)) {
    const step = width / most;
    part.lengths.forEach((length, i) => { boxes[i] = [i * step, LANE - 3 - tall(length), Math.max(0.6, step * 0.82), tall(length), i < part.carriedIn]; });
    return {boxes, behind};
  }
  const members = new Map();
  part.lengths.forEach((length, i) => members.set(groups[i], [...(members.get(groups[i]) || []), i]));
  members.forEach(list => list.sort((a, b) => part.lengths[b] - part.lengths[a]));
  const row = (list, x, room, isCarried) => {
    const width = room / list.length;
    list.forEach((i, k) => { boxes[i] = [x + k * width, LANE - 3 - tall(part.lengths[i]), Math.max(0.6, width * 0.84), tall(part.lengths[i]), isCarried]; });
  };
  if (stage < 3) {
    const order = [...members.keys()].sort((a, b) => a - b), gap = Math.min(7, (0.25 * width) / Math.max(1, order.length)), bar = (width - gap * order.length) / most;
    let x = 0;
    for (const group of order) {
      const list = members.get(group), room = bar * list.length, top = tall(part.lengths[list[0]]);
      row(list, x, room, false);
      if (!DATA.isPacked) behind.push({x: x - 0.5, y: LANE - 3 - top, w: room, h: top, kind: "pad"});
      x += room + gap;
    }
    return {boxes, behind};
  }
  const carried = members.get(-1) || [], start = CARRY * width, cell = Math.min(170, (width - start) / Math.max(1, part.count));
  row(carried, 0, Math.min(start - 14, carried.length * 4), true);
  for (let k = 0; k < part.count; k++) {
    const list = members.get(k) || [], x = start + k * cell + cell * 0.05, room = cell * 0.9;
    if (!list.length) { behind.push({x, y: 3, w: room, h: high, kind: "idle"}); continue; }
    const top = tall(part.lengths[list[0]]), wide = Math.min(room, list.length * 14);
    row(list, x, wide, false);
    behind.push({x: x - 0.5, y: LANE - 3 - top, w: wide, h: top, kind: DATA.isPacked ? "room" : "pad"});
  }
  return {boxes, behind, start, cell};
}

const ease = t => (t < 0.5 ? 4 * t * t * t : 1 - (-2 * t + 2) ** 3 / 2);

function fit(canvas, height) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1, context = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

function hatch(context, x, y, w, h) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour("idle");
  context.lineWidth = 1.5;
  context.strokeRect(x + 0.75, y + 0.75, w - 1.5, h - 1.5);
  context.beginPath();
  for (let k = -h; k < w; k += 7) { context.moveTo(x + k, y + h); context.lineTo(x + k + h, y); }
  context.stroke();
  context.restore();
}

/** Draws a lane, its samples ``moved`` of the way from where they were to where they are. */
function drawLane(canvas, part, index) {
  const [context, width] = fit(canvas, LANE);
  if (!part) return;
  const now = place(part, stage(), width), old = boxes.get(index), t = ease(moved), struck = DATA.incidents.some(item => item.round === number() && item.rank === DATA.ranks[index]);
  const paints = {pad: colour("pad"), room: colour("card"), odb: colour("odb"), carried: colour("paper"), done: colour("done")};
  if (stage() > 2 && step !== null && now.cell) {
    const k = step - firstStep();
    if (k >= 0 && k < part.count) { context.fillStyle = colour("chosen"); context.fillRect(now.start + k * now.cell, 0, now.cell, LANE); }
  }
  context.globalAlpha = t;
  for (const one of now.behind) {
    if (one.kind === "idle") hatch(context, one.x, one.y, one.w, one.h);
    else { context.fillStyle = paints[one.kind]; context.fillRect(one.x, one.y, one.w, one.h); }
  }
  context.globalAlpha = 1;
  now.boxes.forEach((box, i) => {
    // What is new comes in from the right.
    const from = old ? old[i] : [width + box[0] * 0.3, box[1], box[2], box[3]];
    const [x, y, w, h] = from ? [0, 1, 2, 3].map(k => from[k] + (box[k] - from[k]) * t) : box;
    context.fillStyle = box[4] ? paints.carried : stage() === 4 ? paints.done : paints.odb;
    context.fillRect(x, y, w, h);
    if (part.lengths[i] > scale()) { context.fillStyle = colour("bg"); context.fillRect(x, y + 5, w, 2); } // longer than is drawn
  });
  if (struck) { context.fillStyle = colour("fault"); context.fillRect(0, 0, 3, LANE); }
  if (moved === 1) canvas.now = now;
}

// What is said -----------------------------------------------------------------------------------------------------------

function describeStage() {
  const parts = round().parts.filter(Boolean), {why} = round(), target = Math.max(0, ...parts.map(part => part.target)), strip = DATA.strip[number()];
  const range = list => { const [low, high] = [Math.min(...list), Math.max(...list)]; return low === high ? low.toLocaleString("en") : `${low.toLocaleString("en")} to ${high.toLocaleString("en")}`; };
  if (!parts.length) return "No rank begins this round.";
  const carried = parts.reduce((sum, part) => sum + part.carriedIn, 0);
  switch (stage()) {
    case 0: return `Each rank holds ${range(parts.map(part => part.lengths.length))} samples` + (carried ? `; ${plural(carried, "is", "are")} carried from the round before.` : ".");
    case 1: return parts[0].groups ? `Each rank makes groups of samples alike in length, under the budget of ${parts[0].budget.toLocaleString("en")} tokens: ${range(parts.map(part => part.formed))} groups.`
      : "The trace does not say which groups a rank has formed before they were split or carried.";
    case 2: return !parts.some(part => part.isAgreed) ? "The offers of all ranks never meet: the traces end before." :
      target ? `The offers meet: this round has ${plural(target, "step")}, for ${why}.` : `The offers meet: ${why}.`;
    case 3: return !strip.steps ? "No step is formed." : `Every rank has exactly ${plural(strip.steps, "step")}. ` + (strip.carried ? `${plural(strip.carried, "sample is", "samples are")} carried to the next round. ` : "Nothing is carried. ") +
      (strip.idle ? `${plural(strip.idle, "batch is", "batches are")} idle.` : "No rank idles.");
    default: return !strip.steps ? DATA.ending : number() === DATA.strip.length - 1 ? `Steps ${range([strip.step, strip.step + strip.steps - 1])}. ${DATA.ending}`
      : `Steps ${range([strip.step, strip.step + strip.steps - 1])}: released by the next round's agreement, once every rank has its batches, and taken at the same time.`;
  }
}

/** Returns what a rank trains on in the step that is chosen; nothing where that is of another round. */
function describeBatch(part) {
  const k = step === null || firstStep() === null ? -1 : step - firstStep();
  if (k < 0 || k >= part.count) return "";
  const lengths = part.lengths.filter((_, i) => part.steps[i] === k), tokens = lengths.reduce((a, b) => a + b, 0);
  if (!lengths.length) return `; <b>idle in step ${step}</b>: ${escape(part.why)}`;
  const padding = DATA.isPacked ? 0 : Math.max(...lengths) * lengths.length - tokens;
  lengths.sort((a, b) => b - a);
  return `; in step ${step} ${plural(lengths.length, "sample")} of ${lengths.slice(0, 12).join(" ")}${lengths.length > 12 ? " …" : ""} tokens: ` +
    `${tokens.toLocaleString("en")}, and ${padding.toLocaleString("en")} of padding`;
}

function describeLane(part) {
  if (!part) return "nothing in its trace";
  const times = part.times || {}, steps = plural(part.count, "step"), idle = part.steps.length ? part.count - new Set(part.steps.filter(k => k >= 0)).size : part.count;
  const kept = part.steps.filter(k => k < 0).length;
  switch (stage()) {
    case 0: return plural(part.lengths.length, "sample") + (part.carriedIn ? `, ${part.carriedIn} carried` : "") + (part.isEnded ? "; its input has ended" : "") + (times.read !== undefined ? `; read in ${seconds(times.read)}` : "");
    case 1: return plural(part.formed, "group") + (part.due ? `, ${part.due} due` : "");
    case 2: return part.isBroken ? "its offer ends the epoch" : (part.emit === null ? `offers all its ${plural(part.formed, "group")}, and reads no more` : `would emit ${part.emit} of ${plural(part.formed, "group")}`) +
      (part.due ? `; ${part.due} due` : "") + (times.offers !== undefined ? `; waited ${seconds(times.offers)} for the others` : "");
    case 3: return part.count ? steps + (kept ? `, ${plural(kept, "sample")} carried` : "") + (idle ? `, <b>${idle} idle</b>` : "") + describeBatch(part) : "no step";
    default: return !part.count ? "no step" : part.taken ? `taken from ${seconds(part.taken[0])} to ${seconds(part.taken[1])}${describeBatch(part)}` : steps + describeBatch(part);
  }
}

/** Writes the numbers of the steps above their columns, as many as there is room for. */
function drawColumns() {
  const [context, width] = fit(get("columns"), 18), {count} = round().parts.find(Boolean) || {count: 0}, start = CARRY * width;
  if (stage() < 3 || !count) return;
  const cell = Math.min(170, (width - start) / count), every = Math.ceil(46 / cell);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = colour("soft");
  context.fillText("carried", 0, 13);
  for (let k = 0; k < count; k++) {
    const isChosen = firstStep() + k === step;
    if (!isChosen && (k % every || (step !== null && Math.abs(firstStep() + k - step) < every))) continue;
    context.fillStyle = colour(isChosen ? "ink" : "soft");
    context.fillText((firstStep() + k).toLocaleString("en"), start + k * cell + 3, 13);
  }
}

function drawStrip() {
  const [context, width] = fit(get("strip"), 44), wide = width / DATA.strip.length, most = Math.max(1, ...DATA.strip.map(one => one.steps));
  DATA.strip.forEach((one, k) => {
    const high = (34 * one.steps) / most, idle = one.steps ? (high * one.idle) / (one.steps * DATA.world) : 0, isPlayed = k >= first && k < stop;
    context.globalAlpha = isPlayed ? 1 : 0.35;
    context.fillStyle = colour("odb");
    context.fillRect(k * wide + 0.5, 40 - high, Math.max(1, wide - 1), high - idle);
    context.fillStyle = colour("idle");
    context.fillRect(k * wide + 0.5, 40 - idle, Math.max(1, wide - 1), idle);
    context.globalAlpha = 1;
    if (DATA.incidents.some(item => item.round === k)) { context.fillStyle = colour("fault"); context.fillRect(k * wide, 0, Math.max(3, wide), 4); }
  });
  context.fillStyle = colour("ink");
  context.fillRect((number() + (stage() + 0.5) / STAGES.length) * wide - 1, 0, 2, 44);
}

// The player -------------------------------------------------------------------------------------------------------------

function draw() {
  document.querySelectorAll("#lanes canvas").forEach((canvas, index) => drawLane(canvas, round().parts[index], index));
}

function show() {
  const label = `Round ${(DATA.first + number()).toLocaleString("en")}`, hurt = DATA.incidents.filter(item => item.round === number());
  get("head").textContent = `${label}: ${STAGES[stage()].toLowerCase()}`;
  get("said").textContent = describeStage();
  get("strike").hidden = !hurt.length;
  get("strike").textContent = hurt.map(item => `Rank ${item.rank} ${item.text}.`).join(" ");
  get("stages").innerHTML = STAGES.map((name, k) => `<li${k === stage() ? " class=on aria-current=step" : ""}><button data-stage=${k}>${name}</button></li>`).join("");
  document.querySelectorAll("#lanes p span").forEach((text, index) => { text.innerHTML = describeLane(round().parts[index]); });
  get("scrub").value = at;
  get("scrub").setAttribute("aria-valuetext", `${label}, ${STAGES[stage()]}`);
  get("step").value = step ?? "";
  drawStrip();
  drawColumns();
  draw();
  history.replaceState(null, "", `#round=${DATA.first + number()}&stage=${stage()}${step === null ? "" : `&step=${step}`}`);
}

/** Goes to a place, counted in stages from the first round that is played. */
function go(to, isSmooth = true) {
  to = Math.max(0, Math.min(last, to));
  const isSame = Math.floor(to / STAGES.length) === Math.floor(at / STAGES.length), canvases = [...document.querySelectorAll("#lanes canvas")];
  boxes = new Map(isSame ? canvases.map((canvas, index) => [index, canvas.now?.boxes]) : []);
  at = to;
  moved = isSmooth && !isCalm.matches ? 0 : 1;
  before = performance.now();
  show();
  if (moved < 1) requestAnimationFrame(tick);
}

function tick(now) {
  moved = Math.min(1, (now - before) / (520 / Math.max(1, Number(get("speed").value))));
  draw();
  if (moved < 1) requestAnimationFrame(tick);
}

function play(wanted) {
  isPlaying = wanted;
  clearTimeout(due);
  const button = document.querySelector("[data-do=play]");
  button.textContent = isPlaying ? "Pause" : "Play";
  button.setAttribute("aria-pressed", String(isPlaying));
  if (!isPlaying) return;
  if (at >= last) go(0);
  const on = () => {
    if (at >= last) return play(false);
    go(at + 1);
    due = setTimeout(on, 1500 / Number(get("speed").value));
  };
  due = setTimeout(on, 700 / Number(get("speed").value));
}

/** Chooses a step, and goes to the round that it is of, if that is played. */
function choose(wanted) {
  const place = DATA.strip.findIndex(one => one.step !== null && wanted >= one.step && wanted < one.step + one.steps);
  if (place < first || place >= stop) { get("step").value = step ?? ""; return; }
  step = wanted;
  go((place - first) * STAGES.length + Math.max(3, place === number() ? stage() : 3), place !== number());
}

const DO = {
  home: () => go(0), end: () => go(last), back: () => go(at - 1), next: () => go(at + 1), play: () => play(!isPlaying),
};

get("lanes").innerHTML = DATA.ranks.map(rank => `<div class=lane><p><b>rank ${rank}</b> <span></span></p><canvas role=img aria-label="samples of rank ${rank}"></canvas></div>`).join("");
get("scrub").max = last;
get("scrub").addEventListener("input", () => { play(false); go(Number(get("scrub").value)); });
get("step").addEventListener("change", () => { if (get("step").value !== "") { play(false); choose(Number(get("step").value)); } });
document.querySelectorAll("[data-do]").forEach(button => button.addEventListener("click", () => { if (button.dataset.do !== "play") play(false); DO[button.dataset.do](); }));
get("stages").addEventListener("click", event => { if (event.target.dataset.stage) { play(false); go(at - stage() + Number(event.target.dataset.stage)); } });
get("strip").addEventListener("click", event => {
  const place = Math.floor((event.offsetX / get("strip").clientWidth) * DATA.strip.length);
  play(false);
  go((place - first) * STAGES.length);
});
get("lanes").addEventListener("click", event => {
  const {start, cell} = event.target.now || {};
  if (cell && event.offsetX >= start && stage() > 2) { play(false); choose(Math.min(firstStep() + Math.floor((event.offsetX - start) / cell), firstStep() + DATA.strip[number()].steps - 1)); }
});
addEventListener("keydown", event => {
  if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    ArrowRight: () => go(event.shiftKey ? at - stage() + STAGES.length : at + 1), ArrowLeft: () => go(event.shiftKey ? at - stage() - (stage() ? 0 : STAGES.length) : at - 1),
    Home: DO.home, End: DO.end, " ": DO.play, "[": () => choose((step ?? firstStep() + 1) - 1), "]": () => choose((step ?? firstStep() - 1) + 1),
  };
  if (!keys[event.key] || (event.key === " " && event.target.tagName === "BUTTON")) return;
  event.preventDefault();
  if (event.key !== " ") play(false);
  keys[event.key]();
});
addEventListener("resize", () => { moved = 1; show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
const asked = new URLSearchParams(location.hash.slice(1)), wanted = Number(asked.get("round") ?? DATA.first + DATA.start[0]) - DATA.first;
if (asked.has("step")) step = Number(asked.get("step"));
go((wanted - first) * STAGES.length + Number(asked.get("stage") ?? DATA.start[1]), false);
