// Read-outs under the pointer or the arrow keys, the distributions of a layer, sorting, and showing or hiding runs.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const BETA = "\u03b2", GAMMA = "\u03b3", PHI = "\u03a6", DELTA = "\u03b4";
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const numbers = (element) => Object.fromEntries(
    Object.entries(element.dataset).map(([key, value]) => [key, Number(value)]));
  const dataOf = (figure) => {
    const source = figure && one("script[type='application/json']", figure);
    return source ? JSON.parse(source.textContent) : null;
  };
  const draw = (tag, attributes, ...children) => {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const make = (tag, attributes, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };
  const short = (value) => Number(value.toPrecision(3)).toString().replace("-", "\u2212");
  // What an axis applies to its values; WARPS in scales.py must agree.
  const warps = {
    linear: (value) => value, sqrt: (value) => Math.sqrt(Math.max(value, 0)),
    error: (value) => -Math.sqrt(Math.max(100 - value, 0)), log: (value) => Math.log10(Math.max(value, 1e-30)),
  };
  const shareOf = (warp, value, low, high) => {
    const at = warps[warp];
    return Math.min(Math.max((at(value) - at(low)) / (at(high) - at(low)), 0), 1);
  };
  // Position of a pointer in the pixels of the drawing.
  const inside = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

  document.documentElement.classList.add("scripts");
  for (const element of all(".scripted")) element.hidden = false;

  // ---- Lines against epochs ------------------------------------------------------------------------------------
  function curves(figure) {
    const data = dataOf(figure), readout = one(".readout", figure), hidden = new Set();
    const place = (box, index) => {
      const at = numbers(box), cursor = one(".cursor", box), panels = all(".panel", box);
      const x = at.left + (data.x[index] - at.first) / (at.last - at.first) * (at.right - at.left);
      cursor.replaceChildren(draw("line", { x1: x, x2: x, y1: at.top, y2: at.bottom }));
      data.series.forEach((line, position) => {
        const value = line.y[index], panel = panels[line.panel];
        if (value === null || !panel || hidden.has(line.group ?? position)) return;
        const of = numbers(panel), share = shareOf(panel.dataset.warp, value, of.low, of.high);
        const y = of.bottom + share * (of.top - of.bottom);
        cursor.append(draw("circle", { cx: x, cy: y, r: 4, class: line.style }));
      });
    };
    let current = data.x.length - 1;
    readout.textContent = "Point at the chart, or move along it with the arrow keys, to read any epoch.";
    const show = (index) => {
      current = Math.min(Math.max(index, 0), data.x.length - 1);
      for (const box of all(".chart", figure)) place(box, current);
      const said = [make("span", {}, make("b", {}, `epoch ${data.x[current]}`)), " "];
      data.series.forEach((line, position) => {
        if (line.y[current] === null || hidden.has(line.group ?? position)) return;
        const mark = make("i", { className: line.style });
        const value = line.y[current], text = line.percent ? `${value.toFixed(2)}\u202f%` : short(value);
        said.push(make("span", {}, mark, `${line.label} `, make("b", {}, text)), " ");
      });
      readout.replaceChildren(...said);
    };
    for (const box of all(".chart", figure)) {
      const svg = one("svg", box), at = numbers(box);
      svg.tabIndex = 0;
      svg.addEventListener("pointermove", (event) => {
        const share = (inside(svg, event).x - at.left) / (at.right - at.left);
        const epoch = at.first + share * (at.last - at.first);
        let nearest = 0;
        data.x.forEach((x, index) => { if (Math.abs(x - epoch) < Math.abs(data.x[nearest] - epoch)) nearest = index; });
        show(nearest);
      });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
        if (step) { event.preventDefault(); show(current + step); }
      });
      svg.addEventListener("pointerleave", () => { for (const g of all(".cursor", figure)) g.replaceChildren(); });
    }
    // On a comparison the entries of the legend show and hide a group of runs.
    for (const item of all(".legend li[data-group]", figure)) {
      const group = Number(item.dataset.group), button = make("button", { type: "button" }, ...item.childNodes);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const shown = hidden.has(group);
        if (shown) hidden.delete(group); else hidden.add(group);
        button.setAttribute("aria-pressed", String(shown));
        for (const path of all(`.line.group-${group}`, figure)) path.classList.toggle("muted-series", !shown);
        show(current);
      });
      item.replaceChildren(button);
    }
  }

  // ---- Gaussians of one layer ----------------------------------------------------------------------------------
  // Abramowitz and Stegun 7.1.26, with an error below 2e-7.
  const below = (z) => {
    const x = Math.abs(z) / Math.SQRT2, t = 1 / (1 + 0.3275911 * x);
    const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    const value = 1 - 0.5 * tail * Math.exp(-x * x);
    return z < 0 ? 1 - value : value;
  };
  const deadMass = (data, beta, gamma) => below((data.delta - beta) / (gamma + 1e-8));

  function words(data, site, index) {
    const beta = site.beta[index] / 1e4, gamma = site.gamma[index] / 1e4;
    return `${site.name}, channel ${index}: ${BETA} ${short(beta)}, |${GAMMA}| ${short(gamma)}, ` +
      `${PHI}(${DELTA}) ${deadMass(data, beta, gamma).toFixed(3)}, ${site.keep[index] === "1" ? "kept" : "dropped"}`;
  }

  // A bell curve per channel, the most alive on top, filled right of delta.
  function ridges(data, box, site, say) {
    const id = box.dataset.id, at = numbers(box), [low, high] = site.range, rows = one(".rows", box);
    const pixels = (at.right - at.left) / (high - low), place = (value) => at.left + (value - low) * pixels;
    const pitch = (at.bottom - at.top) / site.order.length, delta = place(data.delta);

    const ticks = site.ticks[box.classList.contains("narrow") ? "narrow" : "wide"];
    const digits = Math.max(...ticks.map((tick) => (String(tick).split(".")[1] ?? "").length));
    one(".ridge-axis", box).replaceChildren(...ticks.flatMap((tick) => [
      draw("line", { x1: place(tick), x2: place(tick), y1: at.top - 36, y2: at.bottom, class: "grid" }),
      draw("text", { x: place(tick), y: at.bottom + 17, class: "tick middle" }, tick.toFixed(digits).replace("-", "\u2212")),
    ]));
    for (const end of ["x1", "x2"]) one(".at-delta", box).setAttribute(end, delta);
    one(".delta-label", box).setAttribute("x", delta + 6);
    const live = one(`#${id}-live rect`, box);
    const split = Math.min(Math.max(delta, at.left), at.right);
    live.setAttribute("x", split);
    live.setAttribute("width", at.right - split);

    rows.replaceChildren(...site.order.map((index, position) => {
      const beta = site.beta[index] / 1e4, gamma = site.gamma[index] / 1e4, base = at.top + (position + 1) * pitch;
      const style = site.keep[index] === "1" ? "kept" : "dropped";
      const transform = `matrix(${Math.max(gamma * pixels, 0.5)} 0 0 ${Math.min(40, 2.6 * pitch)} ${place(beta)} ${base})`;
      const use = (extra) => draw("use", { href: `#${id}-bell`, transform, ...extra });
      const curve = draw("g", { class: style }, use({ class: "outline" }),
        draw("g", { "clip-path": `url(#${id}-live)` }, use({})));
      const row = draw("g", {}, draw("g", { "clip-path": `url(#${id}-frame)` }, curve), draw("rect", {
        x: at.from, y: base - Math.min(pitch * 0.78, 16), height: Math.min(pitch * 0.62, 12), class: `share ${style}`,
        width: Math.max((1 - deadMass(data, beta, gamma)) * (at.to - at.from), 0.6),
      }));
      if (place(beta) < at.left) {
        row.append(draw("path", { d: `M${at.left + 1} ${base - 3}l6 -3v6z`, class: `away ${style}` }));
      }
      const target = draw("rect", { x: 0, y: base - pitch, width: at.to, height: pitch, class: "target" });
      target.addEventListener("pointerenter", () => { row.classList.add("lit"); say(words(data, site, index)); });
      target.addEventListener("pointerleave", () => { row.classList.remove("lit"); say(site.tally); });
      row.append(target);
      return row;
    }));
    const kept = site.order.filter((index) => site.keep[index] === "1").length;
    for (const [style, flag, row, shown] of [["kept", "1", 0, kept], ["dropped", "0", kept, site.order.length - kept]]) {
      const count = `${[...site.keep].filter((each) => each === flag).length} ${style}`;
      const attributes = { x: at.right, y: at.top + row * pitch + 12, class: `label strong end ${style}` };
      if (shown) rows.append(draw("text", attributes, count));
    }
    const title = `Distributions of the channels of ${site.name}`;
    one("svg title", box).textContent = title;
    one("svg desc", box).textContent = site.tally;
    one("svg", box).setAttribute("aria-label", `${title}. ${site.tally}`);
  }

  function gaussians(figure, data) {
    const select = one("select", figure), readout = one(".readout", figure);
    const say = (text) => { readout.textContent = text; };
    const show = () => {
      const site = data.sites[Number(select.value)];
      for (const box of all(".chart", figure)) ridges(data, box, site, say);
      say(site.tally);
    };
    select.addEventListener("change", show);
    for (const button of all("button[data-step]", figure)) button.addEventListener("click", () => {
      const count = data.sites.length;
      select.value = String((Number(select.value) + Number(button.dataset.step) + count) % count);
      show();
    });
    show();
  }

  // ---- SCP beside Slimming -------------------------------------------------------------------------------------
  function plane(figure, data) {
    const box = one(".chart", figure), svg = one("svg", box), at = numbers(box);
    const readout = one(".readout", figure), cursor = one(".cursor", box);
    const points = data.sites.flatMap((site) => site.beta.map((beta, index) => {
      const up = shareOf(box.dataset.warp, site.gamma[index] / 1e4, 0, at.most);
      const across = shareOf("linear", beta / 1e4, at.low, at.high);
      return { site, index, x: at.left + across * (at.right - at.left), y: at.bottom + up * (at.top - at.bottom) };
    }));
    const hint = "Point at a dot to see its channel, or at a kind of channel to single it out.";
    readout.textContent = hint;
    const kinds = ["both keep it", "only Slimming drops it", "only SCP drops it", "both drop it"];
    svg.addEventListener("pointermove", (event) => {
      const here = inside(svg, event);
      let found = null, best = 144;
      for (const point of points) {
        const far = (point.x - here.x) ** 2 + (point.y - here.y) ** 2;
        if (far < best) { best = far; found = point; }
      }
      cursor.replaceChildren(...(found ? [draw("circle", { cx: found.x, cy: found.y, r: 6, class: "ring" })] : []));
      readout.textContent = found
        ? `${words(data, found.site, found.index)}; ${kinds[Number(found.site.quadrant[found.index])]}` : hint;
    });
    svg.addEventListener("pointerleave", () => { cursor.replaceChildren(); readout.textContent = hint; });
    for (const card of all(".case", figure)) {
      card.tabIndex = 0;
      const focus = () => { figure.dataset.focus = card.dataset.kind; };
      const blur = () => { delete figure.dataset.focus; };
      card.addEventListener("pointerenter", focus);
      card.addEventListener("focus", focus);
      card.addEventListener("pointerleave", blur);
      card.addEventListener("blur", blur);
    }
  }

  // ---- Tables --------------------------------------------------------------------------------------------------
  function sortable(table) {
    const heads = all("thead th", table), body = one("tbody", table);
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = make("button", { type: "button", title: "Sort by this column" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => {
          const value = row.cells[column].dataset.value;
          return value === undefined ? null : Number(value);
        };
        const named = [...body.rows].every((row) => key(row) === null);
        const compare = (a, b) => {
          if (named) return a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
          return (key(a) ?? -Infinity) - (key(b) ?? -Infinity);
        };
        const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b));
        body.append(...rows);
      });
    });
  }

  for (const figure of all("figure.curves")) curves(figure);
  const figure = one("#gaussians"), channels = dataOf(figure);
  if (channels) {
    gaussians(figure, channels);
    if (one("#decisions")) plane(one("#decisions"), channels);
  }
  for (const table of all("table.sortable")) sortable(table);
  for (const button of all(".copy")) button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(one("code", button.parentElement).textContent);
    button.textContent = "Copied";
  });
  addEventListener("beforeprint", () => { for (const part of all("details")) part.open = true; });
})();
