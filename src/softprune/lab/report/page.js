// Tables are sorted by a click on the head of a column; what is folded opens for the printer.
"use strict";
const compare = (column) => (a, b) => {
  const [x, y] = [a, b].map((row) => row.cells[column].dataset.value ?? row.cells[column].textContent);
  return parseFloat(x) - parseFloat(y) || x.localeCompare(y, "en", { numeric: true });
};
for (const head of document.querySelectorAll("thead th")) {
  if (!head.textContent) continue;
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending", body = head.closest("table").tBodies[0];
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sorted = [...body.rows].sort(compare(head.cellIndex));
    body.append(...(down ? sorted.reverse() : sorted));
  });
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
