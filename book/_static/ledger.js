// sort and filter the claims ledger; without this script it is a plain table
document.addEventListener("DOMContentLoaded", () => {
  for (const ledger of document.querySelectorAll(".ledger")) {
    const body = ledger.querySelector("tbody");
    const rows = [...body.rows];
    const filters = [...ledger.querySelectorAll("[data-column]")];
    const filter = () => {
      let left = 0;
      for (const row of rows) {
        row.hidden = !filters.every(({ value, dataset }) =>
          dataset.column ? !value || row.dataset[dataset.column] === value : row.textContent.toLowerCase().includes(value.toLowerCase()));
        left += !row.hidden;
      }
      ledger.querySelector("output").textContent = `${left} claims`;
    };
    filters.forEach((control) => control.addEventListener("input", filter));
    const heads = [...ledger.querySelectorAll("th")];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      rows.sort((a, b) => (down ? -1 : 1) * text(a).localeCompare(text(b), "en", { numeric: true }));
      body.append(...rows);
    }));
  }
});
