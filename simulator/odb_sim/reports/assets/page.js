"use strict";
// Draws what a page's data describe: see charts.py for their shapes. One chart for each element with data-chart.
const DATA = JSON.parse(document.getElementById("data").textContent);
const isNarrow = () => window.innerWidth < 640;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const escape = text => String(text).replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");
const count = (n, one) => n.toLocaleString("en") + " " + (n === 1 ? one : one + "s");
const drawn = [];

/** Returns a number as a reader wants it: three digits that matter, thousands apart. */
function show(value, percent) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (percent) return (100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0) + "%";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toPrecision(3);
}

/** Returns the same for an axis, where no digit stands that says nothing. */
const tick = (value, percent) => (percent ? Number((100 * value).toPrecision(3)) + "%" : Number(value.toPrecision(4)).toLocaleString("en", {maximumFractionDigits: 12}));

const text = () => ({color: colour("soft"), fontSize: 12, fontFamily: getComputedStyle(document.body).fontFamily});
const tip = () => ({
  confine: true, backgroundColor: colour("bg"), borderColor: colour("line"), padding: [8, 11], textStyle: {color: colour("ink"), fontSize: 13},
  extraCssText: "box-shadow:0 4px 18px #0003;border-radius:8px",
});
const axis = more => ({
  axisLabel: {...text(), hideOverlap: true, ...more.axisLabel}, nameTextStyle: text(), axisLine: {lineStyle: {color: colour("line")}},
  axisTick: {show: false}, splitLine: {lineStyle: {color: colour("line")}}, ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "axisLabel")),
});

function zoom(total, shown) {
  if (shown >= total) return [];
  const end = (100 * shown) / total;
  return [
    {type: "inside", start: 0, end, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false},
    {type: "slider", start: 0, end, height: 20, bottom: 4, brushSelect: false, showDetail: false, borderColor: colour("line"),
     fillerColor: colour("accent") + "33", backgroundColor: colour("card"), handleStyle: {color: colour("accent"), borderColor: colour("accent")},
     moveHandleStyle: {color: colour("accent")}, dataBackground: {lineStyle: {opacity: 0}, areaStyle: {opacity: 0}},
     selectedDataBackground: {lineStyle: {opacity: 0}, areaStyle: {opacity: 0}}},
  ];
}

// What each rank trains on in each step ------------------------------------------------------------------------------

function describeCell(map, x, y) {
  const n = map.samples[y][x], rank = map.ranks[y], slow = map.slow[x], wait = map.wait[y][x];
  const where = `<b>Rank ${rank}, step ${map.steps[x].toLocaleString("en")}</b>` + (map.rounds ? ` <span class=soft>round ${map.rounds[x]}</span>` : "");
  const waits = slow === null ? "" : slow === rank ? "The others wait for this rank." : wait ? `Waits ${show(wait)} ms for rank ${slow}.` : "";
  if (map.note && map.note.x === x && map.note.rank === rank) return `<div class=tip>${where}<br>${escape(map.note.text)}</div>`;
  if (!n) return `<div class=tip>${where}<br>Idle: nothing left to train on. ${waits}</div>`;
  const real = map.real[y][x], padded = map.padded[y][x], lengths = map.lengths[y][x], more = n - lengths.length;
  const over = padded > map.budget ? ` That is over the budget.` : "";
  return `<div class=tip>${where}<br>${count(n, "sample")}: ${lengths.join(", ")}${more > 0 ? ` and ${more} shorter` : ""} tokens<br>` +
    `${real.toLocaleString("en")} of ${map.budget.toLocaleString("en")} tokens filled, <b>${show(real / map.budget, true)}</b>; ` +
    `${padded > real ? `${(padded - real).toLocaleString("en")} of padding` : "no padding"}.${over}<br>${waits}</div>`;
}

function heat(map, element) {
  const fills = ["fill0", "fill1", "fill2", "fill3"].map(colour), cells = [];
  map.ranks.forEach((rank, y) => map.steps.forEach((step, x) => {
    if (step === null) return; // steps are left out here
    if (map.note && map.note.x === x) {
      if (map.note.rank === rank) cells.push({value: [x, y, 0], itemStyle: {color: colour("fault")}});
      return;
    }
    const fill = map.real[y][x] / map.budget, over = map.padded[y][x] > map.budget && map.samples[y][x] > 1;
    cells.push(map.samples[y][x] ? {value: [x, y, Math.min(1, fill)], itemStyle: over ? {borderColor: colour("fault"), borderWidth: 1.5} : {}}
      : {value: [x, y, 0], itemStyle: {color: colour("idle")}});
  }));
  const room = element.clientWidth - 70, least = isNarrow() ? 7 : 9, shown = Math.max(8, Math.floor(room / least));
  const gap = map.ranks.length > 32 || room / Math.min(shown, map.steps.length) < 6 ? 0 : 1;
  return {
    animation: false, tooltip: {...tip(), formatter: item => describeCell(map, item.value[0], item.value[1])},
    grid: {left: 62, right: 8, top: 6, bottom: map.steps.length > shown ? 52 : 30},
    xAxis: axis({type: "category", data: map.steps.map(step => (step === null ? "⋯" : step.toLocaleString("en"))), splitLine: {show: false}}),
    yAxis: axis({type: "category", inverse: true, data: map.ranks.map(rank => "rank " + rank), splitLine: {show: false}}),
    visualMap: {show: false, min: 0, max: 1, dimension: 2, inRange: {color: fills}},
    dataZoom: zoom(map.steps.length, shown),
    series: [{type: "heatmap", data: cells, progressive: 0, itemStyle: {borderColor: colour("bg"), borderWidth: gap, borderRadius: gap ? 2 : 0},
              emphasis: {itemStyle: {borderColor: colour("ink"), borderWidth: 1.5}}}],
  };
}

// Lines, bars, spans ---------------------------------------------------------------------------------------------------

const legend = names => (names.length > 1 ? {data: names, bottom: 0, itemWidth: 14, itemHeight: 9, itemGap: 12, textStyle: text(), icon: "roundRect"} : undefined);
/** Returns the pixels below a chart that its legend takes. */
const below = names => {
  const letters = names.reduce((sum, name) => sum + name.length * 7 + 40, 0);
  return names.length > 1 ? 22 * Math.ceil(letters / (Math.min(innerWidth, 1216) - 40)) + 4 : 0;
};

function lines(chart) {
  const format = value => show(value, chart.is_percent) + (chart.unit ? " " + chart.unit : ""), names = chart.series.map(one => one.name);
  const series = chart.series.map(one => ({type: "line", name: one.name, color: colour(one.colour), data: one.values.map((y, at) => at === chart.mark
      ? {value: y, symbolSize: 13, itemStyle: {color: colour("bg"), borderColor: colour("fault"), borderWidth: 2.5}} : y),
      symbol: "circle", symbolSize: 6, showSymbol: chart.x.length <= 40, connectNulls: true, lineStyle: {width: chart.is_stack ? 0 : 2},
      ...(chart.is_stack ? {stack: "all", areaStyle: {opacity: 0.85}, symbol: "none"} : {})}));
  return {
    animation: false, legend: legend(names), series,
    tooltip: {...tip(), trigger: "axis", formatter: items => `<div class=tip>${escape(chart.x_name)} <b>${escape(items[0].axisValueLabel)}</b>` + items.filter(item => names.includes(item.seriesName) && item.value !== undefined)
      .map(item => `<br>${item.marker}${escape(item.seriesName)}: <b>${format(item.value)}</b>`).join("") + "</div>"},
    grid: {left: 4, right: 14, top: 14, bottom: below(names) + 24, containLabel: true, outerBoundsMode: "same"},
    xAxis: axis({type: "category", data: chart.x.map(x => (typeof x === "number" ? x.toLocaleString("en") : x)), name: chart.x_name, nameLocation: "middle", nameGap: 26, boundaryGap: !chart.is_stack, splitLine: {show: false}}),
    yAxis: axis({type: "value", scale: !(chart.has_zero || chart.is_stack), min: (chart.has_zero || chart.is_stack) ? 0 : undefined, max: chart.is_stack && chart.is_percent ? 1 : undefined, interval: chart.is_stack && chart.is_percent ? 0.25 : undefined, splitNumber: 4, axisLine: {show: false}, axisLabel: {formatter: value => tick(value, chart.is_percent)}}),
  };
}

function bars(chart) {
  const format = value => (chart.digits === null ? show(value, chart.is_percent) : value.toFixed(chart.digits)), names = chart.series.map(one => one.name);
  const own = chart.series.map(one => ({
    type: chart.is_dots ? "scatter" : "bar", name: one.name, color: colour(one.colour), symbolSize: 11, barMaxWidth: 22, barCategoryGap: "35%",
    data: one.values.map((x, at) => ({value: chart.is_dots ? [x, at] : x, itemStyle: {color: colour(one.colours ? one.colours[at] : one.colour), opacity: chart.is_dots ? 0.85 : 1, borderRadius: chart.is_dots ? 0 : 3}})),
    label: chart.is_dots || chart.series.length > 2 ? {show: false} : {show: true, position: "right", formatter: item => format(item.value), ...text(), color: colour("ink")}}));
  return {
    animation: false, legend: legend(names), series: own,
    tooltip: {...tip(), formatter: item => `<div class=tip><b>${escape(chart.names[item.dataIndex])}</b>${names.length > 1 ? `, ${escape(item.seriesName)}` : ""}: <b>${format(chart.is_dots ? item.value[0] : item.value)}</b>` + "</div>"},
    grid: {left: 4, right: 52, top: 8, bottom: below(names) + 8, containLabel: true, outerBoundsMode: "same"},
    xAxis: axis({type: "value", min: chart.is_dots ? undefined : 0, scale: chart.is_dots, splitNumber: isNarrow() ? 3 : 5, axisLabel: {formatter: value => tick(value, chart.is_percent)}}),
    yAxis: axis({type: "category", inverse: true, data: chart.names, splitLine: {show: !!chart.is_dots}}),
  };
}

function spans(chart) {
  // Between the two ends of a gap nothing happens but waiting, so time runs faster there.
  const [from, to] = chart.gap_s || [Infinity, Infinity], whole = chart.end_s - chart.begin_s - (chart.gap_s ? to - from : 0), pace = (0.22 * whole) / (to - from);
  const place = t => (t < from ? t : t < to ? from + (t - from) * pace : from + (to - from) * pace + t - to);
  const moment = x => (x < from ? x : x < from + (to - from) * pace ? from + (x - from) / pace : x - from - (to - from) * pace + to);
  const colours = Object.fromEntries(chart.kinds.map(([name, shade]) => [name, colour(shade)])), marks = chart.mark ? [chart.mark] : [];
  return {
    animation: false, legend: legend(chart.kinds.map(([name]) => name)),
    tooltip: {...tip(), formatter: item => (item.seriesName === "fault" ? `<div class=tip>${escape(chart.mark.text)}</div>`
      : `<div class=tip>${escape(chart.lanes[item.value[0]])}: <b>${escape(item.seriesName)}</b><br>${show(1000 * (item.value[4] - item.value[3]))} ms, from ${show(item.value[3])} s</div>`)},
    grid: {left: 4, right: 14, top: 22, bottom: below(chart.kinds.map(([name]) => name)) + 28, containLabel: true, outerBoundsMode: "same"},
    xAxis: axis({type: "value", min: place(chart.begin_s), max: place(chart.end_s), name: "simulated seconds", nameLocation: "middle", nameGap: 24, splitNumber: isNarrow() ? 3 : 6, splitLine: {show: false},
      axisLabel: {showMinLabel: false, showMaxLabel: false, formatter: x => (x > from && x < from + (to - from) * pace ? "" : tick(moment(x)))}}),
    yAxis: axis({type: "category", inverse: true, data: chart.lanes, splitLine: {show: false}}),
    series: [
      ...chart.kinds.map(([name]) => ({
        type: "custom", name, color: colours[name], encode: {x: [1, 2], y: 0},
        data: chart.spans.filter(span => span[1] === name).map(([lane, , begin, end]) => [lane, place(begin), place(end), begin, end]),
        renderItem: (_, api) => {
          const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]), height = api.size([0, 1])[1] * 0.78;
          return {type: "rect", shape: {x: a[0], y: a[1] - height / 2, width: Math.max(1, b[0] - a[0] - 0.6), height, r: 1}, style: {fill: colours[name]}};
        }})),
      ...marks.map(mark => ({type: "scatter", name: "fault", symbol: "diamond", symbolSize: 16, z: 9, color: colour("fault"), data: [[place(mark.at_s), mark.lane]],
        markLine: {silent: true, symbol: "none", lineStyle: {color: colour("fault"), type: "solid", width: 1.5}, label: {...text(), color: colour("fault"), formatter: mark.label, position: "start"}, data: [{xAxis: place(mark.at_s)}]}})),
      ...(chart.gap_s ? [{type: "scatter", data: [], markArea: {silent: true, itemStyle: {color: colour("line"), opacity: 0.5}, label: {...text(), show: true, position: "top", distance: 4}, data: [[{name: show(to - from) + " s", xAxis: place(from)}, {xAxis: place(to)}]]}}] : []),
    ],
  };
}

// Sliders over what was swept --------------------------------------------------------------------------------------------

/** Lets a reader choose a value of each swept setting; shows what came of it, and curves across one setting. */
function explore(element, spec) {
  let at = [...spec.start], across = spec.dimensions.reduce((best, dim, number) => (dim.values.length > spec.dimensions[best].values.length ? number : best), 0);
  const same = (row, places, but) => row.at.every((place, dim) => dim === but || place === null || place === places[dim]);
  const values = (dim, place) => spec.dimensions[dim].values[place].toLocaleString("en");
  element.innerHTML = `<div class=sliders>${spec.dimensions.map((dim, number) => `<label>${escape(dim.name)} <output></output><input type=range min=0 max=${dim.values.length - 1} step=1 aria-label="${escape(dim.name)}" data-dim=${number}></label>`).join("")}</div>
    <p class=note aria-live=polite></p><div class=scroll><table><thead><tr><th>policy</th>${spec.measures.map(one => `<th>${escape(one.name)}</th>`).join("")}</tr></thead><tbody></tbody></table></div>
    <div class=tabs>curves across ${spec.dimensions.map((dim, number) => `<button data-across=${number}>${escape(dim.name)}</button>`).join("")}</div>
    <div class=row>${spec.measures.map((one, number) => (one.is_plotted ? `<div><h3>${escape(one.name)}</h3><div class=chart data-measure=${number} style="height:230px"></div></div>` : "")).join("")}</div>`;
  const update = () => {
    const rows = spec.tried.filter(row => same(row, at, -1));
    element.querySelectorAll("input").forEach((input, dim) => { input.value = at[dim]; input.setAttribute("aria-valuetext", values(dim, at[dim])); });
    element.querySelectorAll("output").forEach((output, dim) => { output.textContent = values(dim, at[dim]); });
    element.querySelectorAll("[data-across]").forEach(button => button.setAttribute("aria-pressed", String(Number(button.dataset.across) === across)));
    element.querySelector(".note").innerHTML = `<code>${escape(spec.dimensions.map((dim, number) => `${dim.flag} ${dim.values[at[number]]}`).join(" "))}</code>${spec.notes[at.join()] ? " " + escape(spec.notes[at.join()]) : ""}`;
    element.querySelector("tbody").innerHTML = rows.map(row => `<tr><td>${escape(row.policy)}</td>${row.values.map((value, number) => `<td>${show(value, spec.measures[number].is_percent)}</td>`).join("")}</tr>`).join("");
    element.querySelectorAll("[data-measure]").forEach(place => {
      const number = Number(place.dataset.measure), dim = spec.dimensions[across], measure = spec.measures[number];
      const policies = [...new Set(spec.tried.map(row => row.policy))], find = (policy, x) =>
        spec.tried.find(row => row.policy === policy && (row.at[across] === x || row.at[across] === null) && same(row, at, across));
      const series = policies.map(policy => ({name: policy, colour: spec.colours[policy], values: dim.values.map((_, x) => (find(policy, x) || {values: []}).values[number] ?? null)}));
      render(place, lines({x: dim.values, x_name: dim.name, is_percent: measure.is_percent, mark: at[across], series: series.filter(one => one.values.some(y => y !== null))}));
    });
  };
  element.querySelectorAll("input").forEach((input, dim) => input.addEventListener("input", () => {
    const wanted = at.map((place, other) => (other === dim ? Number(input.value) : place));
    // Not every combination need have been tried: the nearest that has been, with the value just chosen.
    const far = row => row.at.reduce((sum, place, other) => sum + (place === null ? 0 : Math.abs(place - wanted[other])), 0);
    const nearest = spec.tried.filter(row => row.at[dim] === wanted[dim] || row.at[dim] === null).sort((a, b) => far(a) - far(b))[0];
    at = wanted.map((place, other) => nearest?.at[other] ?? place);
    across = dim;
    update();
  }));
  element.querySelectorAll("[data-across]").forEach(button => button.addEventListener("click", () => { across = Number(button.dataset.across); update(); }));
  return update;
}

// The page -----------------------------------------------------------------------------------------------------------------

function render(element, option) {
  let chart = echarts.getInstanceByDom(element);
  if (!chart) {
    chart = echarts.init(element, null, {renderer: "canvas"});
    drawn.push(chart);
  }
  chart.setOption({textStyle: text(), ...option}, true);
  return chart;
}

const KINDS = {LineChart: lines, Bars: bars, SpanChart: spans};

const HEIGHTS = {
  LineChart: () => 280,
  Bars: chart => 62 + chart.names.length * Math.max(34, 24 * (chart.is_dots ? 1 : chart.series.length)),
  SpanChart: chart => 90 + 20 * chart.lanes.length,
};

/** Draws the maps of a group that has been chosen, or of the only one. */
function maps(element, group) {
  group.maps.forEach((map, number) => {
    const place = element.querySelector(`[data-map="${number}"]`);
    place.style.height = Math.min(620, map.ranks.length * (map.ranks.length > 24 ? 9 : map.ranks.length > 8 ? 16 : 22) + 72) + "px";
    render(place, heat(map, place)).resize();
  });
}

function drawAll() {
  document.querySelectorAll("[data-chart]").forEach(element => {
    const chart = DATA.charts[Number(element.dataset.chart)];
    if (chart.kind === "Maps") maps(element, chart);
    else if (chart.kind === "Sliders") (element.update ||= explore(element, chart))();
    else {
      element.style.height = HEIGHTS[chart.kind](chart) + "px";
      render(element, KINDS[chart.kind](chart)).resize();
    }
  });
}

// A link to an entry of the glossary opens it.
document.querySelectorAll('a[href^="#g-"]').forEach(link => link.addEventListener("click", () => {
  document.getElementById(link.getAttribute("href").slice(1)).closest("details").open = true;
}));
document.querySelectorAll("[data-tabs]").forEach(tabs => tabs.addEventListener("change", event => {
  document.querySelectorAll(`[data-group="${tabs.dataset.tabs}"]`).forEach((group, number) => { group.hidden = number !== event.target.selectedIndex; });
  drawAll();
}));
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let waiting;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { drawn.forEach(chart => chart.resize()); drawAll(); }, 120); });
