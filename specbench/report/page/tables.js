"use strict";
// Tables: sorting by their heading buttons, filtering by the form above them. What they hold stays as it is.
document.documentElement.classList.add("js");

/** The number to sort a cell by: the one given, else the first in its text; null where there is none. */
function sortKey(cell) {
  const text = cell.dataset.v ?? cell.textContent.replaceAll(",", "");
  const number = parseFloat(text);
  return Number.isNaN(number) ? null : number;
}

/** Make a heading the one that sorts; numbers come largest first, and the other way at the second click. */
function nextOrder(heading, isText) {
  const now = heading.getAttribute("aria-sort");
  const first = isText ? "ascending" : "descending";
  const other = isText ? "descending" : "ascending";
  const order = now === first ? other : first;
  for (const one of heading.parentElement.children) one.setAttribute("aria-sort", one === heading ? order : "none");
  return order === "ascending" ? 1 : -1;
}

/** Compare two keys; unknown ones come last whichever way it goes. */
function compareKeys(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

function sortTable(table, heading) {
  const column = heading.cellIndex;
  const rows = [...table.tBodies[0].rows];
  const isText = rows.every((row) => row.cells[column].tagName === "TH");
  const sign = nextOrder(heading, isText);
  const keyed = rows.map((row) => {
    const cell = row.cells[column];
    return [isText ? cell.textContent : sortKey(cell), row];
  });
  keyed.sort((a, b) => compareKeys(a[0], b[0], sign));
  table.tBodies[0].append(...keyed.map((pair) => pair[1]));
}

for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const heading = event.target.closest("th");
    if (heading && event.target.closest("button")) sortTable(table, heading);
  });
}

/** Whether a row is what the form asks for: its text, and the names in its first columns. */
function matches(row, form) {
  const wanted = form.elements.find.value.trim().toLowerCase();
  const names = [...row.querySelectorAll("th")].map((cell) => cell.textContent);
  if (wanted && !names.join(" ").toLowerCase().includes(wanted)) return false;
  return names.every((name, index) => {
    const choice = form.elements[`column${index}`]?.value;
    return !choice || name === choice || (index === 0 && name.startsWith(choice + " / "));
  });
}

function filterTable(form) {
  const table = document.getElementById(form.dataset.table);
  const categories = form.elements.categories?.checked ?? true;
  table.classList.toggle("with-categories", categories);
  let shown = 0;
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    row.hidden = !matches(row, form);
    if (!row.hidden && (categories || !row.classList.contains("category"))) shown += 1;
  }
  form.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
  if (form.elements.show) showColumns(table, form.elements.show.value);
}

/** Show the columns first-last (and the names before them), or all. */
function showColumns(table, range) {
  if (table.dataset.shown === range) return;
  table.dataset.shown = range;
  const [first, last] = range ? range.split("-").map(Number) : [0, Infinity];
  for (const row of table.rows) {
    [...row.cells].forEach((cell, index) => {
      cell.hidden = index >= 3 && (index + 1 < first || index + 1 > last);
    });
  }
}

for (const form of document.querySelectorAll("form[data-table]")) {
  form.addEventListener("input", () => filterTable(form));
  form.addEventListener("submit", (event) => event.preventDefault());
  filterTable(form);
}

// On paper everything is open; afterwards it is as it was.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});
