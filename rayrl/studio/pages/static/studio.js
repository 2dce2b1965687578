// Keyboard, live parts and charts. Every page works without it.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);

  // what was said once, and what a cookie keeps, does not stay in the address
  const address = new URL(location.href);
  for (const name of ["note", "lang", "theme"]) address.searchParams.delete(name);
  if (address.href !== location.href) history.replaceState(history.state, "", address);

  // ---- keyboard -------------------------------------------------------------------------------------------------
  const typing = (node) => node && (node.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(node.tagName));

  function rows() {
    return all("table[data-rows] tbody tr").filter((row) => one("a", row));
  }

  function move(step) {
    const list = rows();
    if (!list.length) {
      const link = one(step > 0 ? "a[rel~=next]" : "a[rel~=prev]");
      if (link) link.click();
      return;
    }
    const now = list.findIndex((row) => row.getAttribute("aria-selected") === "true");
    const next = Math.min(list.length - 1, Math.max(0, now < 0 ? (step > 0 ? 0 : list.length - 1) : now + step));
    list.forEach((row, index) => (index === next ? row.setAttribute("aria-selected", "true") : row.removeAttribute("aria-selected")));
    one("a", list[next]).focus();
    list[next].scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Enter" && event.ctrlKey && event.target.form) event.target.form.requestSubmit();
      return;
    }
    if (typing(event.target) && event.target.type !== "checkbox" && event.target.type !== "radio") {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const dialog = one("dialog#keys");
    if (dialog && dialog.open) {
      if (event.key === "?") dialog.close();
      return;
    }
    if (event.key === "?" && dialog) {
      dialog.showModal();
      event.preventDefault();
      return;
    }
    if (event.key === "j" || event.key === "k") {
      move(event.key === "j" ? 1 : -1);
      event.preventDefault();
      return;
    }
    const target = all("[data-key]").find((node) => node.dataset.key === event.key && !node.disabled);
    if (!target) return;
    event.preventDefault();
    if (typing(target)) target.focus();
    else target.click();
  });

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-open-keys]")) {
      const dialog = one("dialog#keys");
      if (dialog) {
        dialog.showModal();
        event.preventDefault();
      }
    }
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
  });

  // a form sends itself when one of its fields marked so changes
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
  });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.dataset.sent) {
      event.preventDefault(); // a second click changes nothing
      return;
    }
    if (form.method === "post") {
      form.dataset.sent = "1";
      form.setAttribute("aria-busy", "true");
      setTimeout(() => {
        delete form.dataset.sent;
        form.removeAttribute("aria-busy");
      }, 4000);
    }
  });

  // ---- live parts -----------------------------------------------------------------------------------------------
  let fetching = false;
  let again = false;
  async function refresh() {
    if (fetching) {
      again = true;
      return;
    }
    fetching = true;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (one("[data-poll]") && !one("[data-poll]").closest("[data-live]")) {
        one("main").replaceWith(document.adoptNode(one("main", fresh)));
      }
      for (const part of all("[data-live]")) {
        const found = fresh.getElementById(part.id);
        if (!found || found.innerHTML === part.innerHTML || part.contains(document.activeElement)) continue;
        part.replaceWith(document.adoptNode(found));
      }
      drawAll();
    } catch {
      /* the next event tries again */
    } finally {
      fetching = false;
      if (one("[data-poll]")) setTimeout(refresh, 1000);
      if (again) {
        again = false;
        setTimeout(refresh, 1000);
      }
    }
  }

  function listen() {
    if (one("[data-poll]")) setTimeout(refresh, 700);
    const root = one("[data-events]");
    if (!root || root.dataset.ended) return;
    const source = new EventSource(root.dataset.events);
    let timer = null;
    const soon = () => {
      if (timer === null) timer = setTimeout(() => ((timer = null), refresh()), 900);
    };
    source.addEventListener("progress", soon);
    for (const kind of ["paused", "running", "completed", "cancelled", "invalid"]) source.addEventListener(kind, soon);
    source.addEventListener("end", () => {
      source.close();
      setTimeout(refresh, 300);
    });
    window.addEventListener("pagehide", () => source.close());
  }

  // ---- charts ---------------------------------------------------------------------------------------------------
  const style = () => getComputedStyle(document.documentElement);
  const colour = (name) => style().getPropertyValue(`--${name}`).trim() || name;

  function paint(value, key) {
    if (Array.isArray(value)) return value.map((item) => paint(item, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, k)]));
    }
    if (typeof value !== "string" || !/color/i.test(key || "") || !/^[a-z0-9-]+$/.test(value)) return value;
    const found = colour(value);
    return key === "fillcolor" && /^#[0-9a-f]{6}$/i.test(found) ? `${found}30` : found;
  }

  let loading = null;
  function plotly() {
    if (window.Plotly) return Promise.resolve(window.Plotly);
    loading ||= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = document.body.dataset.plotly;
      script.onload = () => resolve(window.Plotly);
      script.onerror = reject;
      document.head.append(script);
    });
    return loading;
  }

  async function draw(chart) {
    const figure = JSON.parse(one("script[type='application/json']", chart).textContent);
    const Plotly = await plotly();
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
    const given = paint(figure.layout || {});
    const layout = {
      height: 230, margin: { l: 48, r: 12, t: 12, b: 40 }, ...given,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style().getPropertyValue("--font"), size: 12, color: colour("ink-2") },
      legend: { orientation: "h", y: 1.12, x: 0, ...(given.legend || {}) },
    };
    for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
    layout.xaxis = { ...axis, ...(layout.xaxis || {}) };
    layout.yaxis = { ...axis, ...(layout.yaxis || {}) };
    const plot = one(".plot", chart);
    await Plotly.newPlot(plot, paint(figure.data), layout, { responsive: true, displayModeBar: false, displaylogo: false });
    chart.dataset.drawn = "1";
    plot.on("plotly_click", (event) => {
      const link = event.points[0] && event.points[0].customdata;
      if (typeof link === "string" && link.startsWith("/")) location.assign(link);
    });
  }
  function drawAll() {
    for (const chart of all(".chart:not([data-drawn])")) draw(chart).catch(() => chart.setAttribute("data-drawn", "failed"));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    all(".chart").forEach((chart) => delete chart.dataset.drawn);
    drawAll();
  });

  drawAll();
  listen();
})();
