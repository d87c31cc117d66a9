// Tables are sorted by a click (or Enter) on a header and saved as CSV or LaTeX.

const units = { kB: 1e3, MB: 1e6, GB: 1e9, ms: 1e-3, min: 60, h: 3600 };

// What a cell is sorted by: its data-value, or the number at its beginning with its unit.
function value(cell) {
  if (cell.dataset.value !== undefined) return +cell.dataset.value;
  const found = cell.textContent.trim().match(/^([-+−]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(?:(kB|MB|GB|ms|min|h)\b)?/);
  return found ? parseFloat(found[1].replace(/,/g, "").replace("−", "-")) * (units[found[2]] ?? 1) : NaN;
}

const empty = (cell) => ["", "-", "–"].includes(cell.textContent.trim());

function sort(table, column) {
  const headers = [...table.tHead.rows[0].cells];
  const up = headers[column].getAttribute("aria-sort") !== "ascending";
  headers.forEach((header) => header.removeAttribute("aria-sort"));
  headers[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  const full = rows.filter((row) => !empty(row.cells[column]));
  const numbers = full.every((row) => !isNaN(value(row.cells[column])));
  const compare = (a, b) => (numbers ? value(a) - value(b) : a.textContent.localeCompare(b.textContent));
  full.sort((a, b) => (up ? 1 : -1) * compare(a.cells[column], b.cells[column]));
  table.tBodies[0].append(...full, ...rows.filter((row) => empty(row.cells[column])));
}

const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" };
Object.assign(special, { "±": "$\\pm$", "≠": "$\\ne$", "–": "--" });

const formats = {
  CSV(rows) {
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
    return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  },
  LaTeX(rows) {
    const escaped = (text) => text.replace(/[\\~^±≠–&%$#_{}]/g, (sign) => special[sign] ?? "\\" + sign);
    const [head, ...body] = rows.map((row) => row.map(escaped).join(" & ") + " \\\\");
    const begin = `\\begin{tabular}{l${"r".repeat(rows[0].length - 1)}}`;
    return [begin, "\\toprule", head, "\\midrule", ...body, "\\bottomrule", "\\end{tabular}", ""].join("\n");
  },
};

function save(table, name, format) {
  const text = formats[format]([...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim())));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name + (format === "CSV" ? ".csv" : ".tex");
  link.click();
}

document.querySelectorAll("table").forEach((table, number) => {
  const wide = document.createElement("div");
  const buttons = document.createElement("div");
  wide.className = "wide";
  buttons.className = "save";
  table.replaceWith(wide);
  wide.append(table);
  wide.after(buttons);
  for (const format of Object.keys(formats)) {
    const button = document.createElement("button");
    button.textContent = format;
    button.title = `save this table as ${format}`;
    button.onclick = () => save(table, table.dataset.name ?? `table-${number + 1}`, format);
    buttons.append(button);
  }
  const headers = [...table.tHead.rows[0].cells];
  // the site scrolls its tables itself, those without a class
  if (headers.length > 3 && !table.closest(".md-typeset")) table.classList.add("cards");
  headers.forEach((header, column) => {
    for (const row of table.tBodies[0].rows) row.cells[column].dataset.label = header.textContent;
    header.tabIndex = 0;
    header.classList.toggle("number", table.tBodies[0].rows[0]?.cells[column].classList.contains("number"));
    header.onclick = () => sort(table, column);
    header.onkeydown = (event) => event.key === "Enter" && sort(table, column);
  });
});

// A page that renews itself stays where its reader is.
if (document.querySelector("meta[http-equiv=refresh]")) {
  scrollTo(0, +sessionStorage.getItem("scrolled"));
  onscroll = () => sessionStorage.setItem("scrolled", scrollY);
}
