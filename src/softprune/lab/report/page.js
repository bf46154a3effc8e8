// Read-outs under the pointer or the arrow keys, sorting, and showing or hiding runs.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
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
    linear: (value) => value,
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
  for (const table of all("table.sortable")) sortable(table);
  for (const button of all(".copy")) button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(one("code", button.parentElement).textContent);
    button.textContent = "Copied";
  });
  addEventListener("beforeprint", () => { for (const part of all("details")) part.open = true; });
})();
