// The filter of the page of the keys: rows without its words are hidden, and headings without rows.
document.addEventListener("input", ({ target }) => {
  if (target.id !== "keys-filter") return;
  const words = target.value.toLowerCase().split(/\s+/);
  for (const table of document.querySelectorAll(".md-content table")) {
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    const whole = table.closest(".md-typeset__scrollwrap") ?? table;
    whole.hidden = rows.every((row) => row.hidden);
    whole.previousElementSibling.hidden = whole.hidden;
  }
});
