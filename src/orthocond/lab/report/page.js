"use strict";
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const plots = [];

  const text = (name) => String(name).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const isDark = () => (root.dataset.theme
    ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const colour = (method) => data.styles[method][isDark() ? "dark" : "light"];
  const faded = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isNarrow = () => window.innerWidth < 640;

  function shown(value) {
    if (value === "inf") return "∞";
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e4 || (size > 0 && size < 1e-2)) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  async function loadLibrary() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    script.remove();
  }

  function layout(options) {
    const grid = variable("--line"), soft = variable("--soft");
    const axis = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont: { color: soft }, automargin: true,
      title: { font: { color: soft, size: 12 }, standoff: 8 } };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: variable("--ink") },
      margin: { l: isNarrow() ? 40 : 56, r: 12, t: 12, b: 44 },
      hoverlabel: { bgcolor: variable("--card"), bordercolor: grid, font: { size: 12, color: variable("--ink") },
        namelength: -1, align: "left" },
      dragmode: isNarrow() ? false : "zoom",
      ...options,
      xaxis: { ...axis, ...options.xaxis, title: { ...axis.title, ...(options.xaxis || {}).title } },
      yaxis: { ...axis, ...options.yaxis, title: { ...axis.title, ...(options.yaxis || {}).title } },
    };
  }
  const config = { responsive: true, displayModeBar: false, scrollZoom: false };

  function curves(view, hidden, xAxis, zoomed) {
    let ceiling = 0;
    for (const lines of Object.values(view.series))
      for (const value of lines.peak) if (typeof value === "number") ceiling = Math.max(ceiling, value);
    ceiling = ceiling > 0 ? (view.log ? ceiling * 10 : ceiling * 1.1) : 1;
    let infinite = false;
    const placed = (values) => values.map((value) => {
      if (value === "inf") { infinite = true; return ceiling; }
      return view.log && value !== null && value <= 0 ? null : value;
    });
    const bands = [], hairs = [], middles = [], marks = [];
    for (const [method, lines] of Object.entries(view.series)) {
      const look = { legendgroup: method, visible: !hidden.has(method), x: view.x };
      const base = method === "svd";
      const at = view.x.map((_, index) => index).filter((index) => lines.middle[index] !== null);
      const low = placed(lines.low), high = placed(lines.high);
      const flat = at.every((index) => lines.low[index] === lines.high[index]);
      if (!flat) bands.push({ ...look, type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0 },
        x: at.map((index) => view.x[index]).concat(at.map((index) => view.x[index]).reverse()),
        y: at.map((index) => low[index] ?? high[index]).concat(at.map((index) => high[index]).reverse()),
        fill: "toself", fillcolor: faded(colour(method), Math.min(.22, .6 / Math.sqrt(Object.keys(view.series).length))) });
      for (const [edge, inner] of [[lines.floor, lines.low], [lines.peak, lines.high]])
        if (at.some((index) => edge[index] !== inner[index])) hairs.push({ ...look, type: "scatter", mode: "lines",
          y: placed(edge), connectgaps: true, hoverinfo: "skip", line: { color: faded(colour(method), .3), width: .7 } });
      middles.push({ ...look, type: "scatter", mode: at.length < 2 ? "markers" : "lines", name: text(method),
        y: placed(lines.middle), connectgaps: true,
        line: { color: colour(method), width: base ? 2.6 : 1.8, dash: data.styles[method].dash },
        customdata: lines.middle.map((value, index) => {
          const range = `${shown(lines.low[index])} to ${shown(lines.high[index])}`;
          const peak = lines.peak[index] === lines.high[index] ? "" : `, peak ${shown(lines.peak[index])}`;
          return shown(value) + (lines.low[index] === lines.high[index] ? "" : ` (${range})`) + peak;
        }),
        hovertemplate: "%{customdata}" + (isNarrow() ? `<br>${xAxis} %{x}` : "") + `<extra>${text(method).replace(/%/g, "&#37;")}</extra>` });
      const peaks = at.filter((index) => lines.peak[index] === "inf");
      if (peaks.length) marks.push({ ...look, type: "scatter", mode: "markers", hoverinfo: "skip",
        x: peaks.map((index) => view.x[index]), y: peaks.map(() => ceiling),
        marker: { symbol: "triangle-up", size: 7, color: colour(method) } });
    }
    const annotations = infinite ? [{ xref: "paper", x: 1, y: view.log ? Math.log10(ceiling) : ceiling, xanchor: "right",
      yanchor: "bottom", text: "▲ infinite", showarrow: false, font: { size: 11, color: variable("--soft") } }] : [];
    const ticks = view.log ? logTicks(view, ceiling) : {};
    return [hairs.concat(bands, middles, marks), layout({
      hovermode: isNarrow() ? "closest" : "x unified", annotations,
      xaxis: { title: { text: xAxis }, rangemode: xAxis === "epoch" || isLater(view) ? "normal" : "tozero", ...(zoomed && view.zoom ? { range: view.zoom[0] } : { autorange: true }),
        dtick: xAxis === "epoch" && view.x.length <= 10 ? 1 : undefined, unifiedhovertitle: { text: `${xAxis} %{x}` } },
      yaxis: { title: { text: view.axis }, type: view.log ? "log" : "linear", exponentformat: "power", rangemode: "tozero",
        ...(zoomed && view.zoom ? { range: view.zoom[1] } : { autorange: true }), ...ticks },
    })];
  }

  // A part of the training that begins later is not shown from step 0.
  const isLater = (view) => view.x.length > 1 && view.x[0] > .2 * view.x[view.x.length - 1];

  // 1, 2 and 5 of each decade, in full: without a format, plotly writes 0.05 as a small 5.
  const WITHIN_DECADES = { dtick: "D2", tickformat: "~g" };

  function logTicks(view, ceiling) {
    let lowest = Infinity;
    for (const lines of Object.values(view.series))
      for (const value of lines.floor) if (typeof value === "number" && value > 0) lowest = Math.min(lowest, value);
    const span = Math.log10(ceiling) - Math.log10(lowest);
    if (span > 3) return { dtick: Math.max(1, Math.ceil(span / 8)) };
    return ceiling < 1e5 && lowest > 1e-4 ? WITHIN_DECADES : { ...WITHIN_DECADES, tickformat: ".0e" };
  }

  const listed = (methods, hidden) => methods.filter((method) => !hidden.has(method)).reverse();

  function errors(section, hidden) {
    const methods = listed(section.byError, hidden).filter((method) => section.means[method] !== null);
    const dots = methods.map((method) => ({ type: "scatter", mode: "markers", name: text(method),
      x: Object.values(section.errors[method]), y: Object.keys(section.errors[method]).map(() => text(method)),
      customdata: Object.keys(section.errors[method]).map((seed) => text(seed)),
      marker: { color: faded(colour(method), .62), size: 8, line: { color: colour(method), width: 1 } },
      hovertemplate: "%{x:.2f} %, seed %{customdata}<extra></extra>" }));
    const means = { type: "scatter", mode: "markers", x: methods.map((method) => section.means[method]), y: methods.map(text),
      marker: { symbol: "line-ns", size: 18, line: { width: 2.5, color: variable("--ink") } },
      hovertemplate: "mean %{x:.2f} %<extra></extra>" };
    const base = section.means[section.baseline];
    const values = methods.flatMap((method) => Object.values(section.errors[method])).filter((value) => typeof value === "number");
    const wide = Math.min(...values) > 0 && Math.max(...values) > 8 * Math.min(...values); // as in charts.py
    const shapes = typeof base === "number" ? [{ type: "line", x0: base, x1: base, y0: 0, y1: 1, yref: "paper", layer: "below",
      line: { color: variable("--soft"), width: 1, dash: "dot" } }] : [];
    return [methods.length ? [...dots, means] : [], layout({ hovermode: "closest", shapes, height: 90 + 26 * Math.max(1, methods.length),
      xaxis: { title: { text: "validation error in %" }, type: wide ? "log" : "linear", ...(wide ? WITHIN_DECADES : {}) },
      yaxis: { type: "category", categoryarray: methods.map(text), showgrid: false, range: [-.6, methods.length - .4] } })];
  }

  function times(section, hidden) {
    const methods = listed(section.methods, hidden).filter((method) => section.seconds[method].step !== null);
    const shades = isDark() ? ["#6fb0f2", "#3f74ab", "#27466a", "#3a3f48"] : ["#1f4f86", "#5b8fc7", "#a9c6e6", "#d9dce2"];
    const phases = ["forward", "backward", "update"];
    const value = (method, phase) => section.seconds[method][phase] || 0;
    const rest = (method) => Math.max(0, value(method, "step") - phases.reduce((sum, phase) => sum + value(method, phase), 0));
    const bars = [...phases, "other"].map((phase, index) => ({ type: "bar", orientation: "h", name: phase,
      y: methods.map(text), x: methods.map((method) => 1000 * (phase === "other" ? rest(method) : value(method, phase))),
      marker: { color: shades[index] }, hovertemplate: `${phase}: %{x:.4g} ms<extra></extra>` }));
    return [methods.length ? bars : [], layout({ barmode: "stack", bargap: .35, showlegend: true, hovermode: "closest",
      legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, traceorder: "normal", font: { color: variable("--soft") } },
      height: 110 + 26 * Math.max(1, methods.length), margin: { l: 56, r: 12, t: 30, b: 44 },
      xaxis: { title: { text: "milliseconds per step" } }, yaxis: { showgrid: false } })];
  }

  function draw(plot) {
    const [traces, arranged] = plot.make();
    plot.div.style.height = arranged.height ? `${arranged.height}px` : "";
    plot.div.closest("figure").hidden = traces.length === 0;
    return Plotly.react(plot.div, traces, arranged, config);
  }

  function drawAll() {
    for (const line of document.querySelectorAll(".legend button")) {
      line.querySelector("line").style.stroke = colour(line.dataset.method);
    }
    return Promise.all(plots.map(draw));
  }

  function setUp() {
    for (const element of document.querySelectorAll("section.experiment")) {
      const section = data.sections[Number(element.dataset.section)];
      const hidden = new Set();
      const own = [];
      for (const figure of element.querySelectorAll("figure.chart")) {
        const div = figure.querySelector(".plot");
        let make = () => (figure.dataset.kind === "errors" ? errors : times)(section, hidden);
        if (figure.dataset.kind === "curves") {
          const chart = section.charts.find((one) => one.key === figure.dataset.chart);
          const zoom = figure.querySelector(".zoom");
          let chosen = 0, zoomed = true;
          make = () => {
            if (zoom) zoom.hidden = !chart.views[chosen].zoom;
            return curves(chart.views[chosen], hidden, chart.xAxis, zoomed);
          };
          for (const group of figure.querySelectorAll(".views")) {
            const buttons = [...group.querySelectorAll("button")];
            for (const button of buttons) button.addEventListener("click", () => {
              if (button.dataset.zoom) zoomed = button.dataset.zoom === "true"; else chosen = Number(button.dataset.view);
              for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
              draw(plot);
            });
          }
        }
        const plot = { div, make };
        own.push(plot);
      }
      plots.push(...own);
      const entries = [...element.querySelectorAll(".legend button")];
      const show = () => {
        for (const entry of entries) entry.setAttribute("aria-pressed", String(!hidden.has(entry.dataset.method)));
        own.forEach(draw);
      };
      for (const entry of entries) {
        const method = entry.dataset.method;
        entry.addEventListener("click", () => { if (!hidden.delete(method)) hidden.add(method); show(); });
        entry.addEventListener("dblclick", () => {
          const alone = entries.every((other) => other === entry || hidden.has(other.dataset.method));
          hidden.clear();
          if (!alone) for (const other of entries) if (other !== entry) hidden.add(other.dataset.method);
          show();
        });
      }
    }
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("orthocond-theme", root.dataset.theme); } catch { /* a page from disk may have no storage */ }
    drawAll();
  });
  try { const kept = localStorage.getItem("orthocond-theme"); if (kept) root.dataset.theme = kept; } catch { /* as above */ }

  try {
    await loadLibrary();
    setUp();
    await drawAll();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let chosen;
    window.addEventListener("beforeprint", () => { chosen = root.dataset.theme; root.dataset.theme = "light"; drawAll(); });
    window.addEventListener("afterprint", () => {
      if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme;
      drawAll();
    });
    root.dataset.ready = "true";
  } catch (error) {
    const trouble = document.getElementById("trouble");
    trouble.textContent = `The charts can't be drawn in this browser (${error.message}); the tables are complete.`;
    trouble.hidden = false;
    root.dataset.ready = "false";
  }
})();
