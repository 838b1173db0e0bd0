// The drill-down. All text reaches the page as text nodes: nothing a model wrote can become markup.
(async () => {
  const list = document.getElementById("question-list");
  if (!list) return;
  const form = document.getElementById("question-filters");
  const more = document.getElementById("more");
  if (typeof DecompressionStream === "undefined") {
    list.append("This browser is too old to unpack the questions (it needs one of 2023 or later); they are in trials.jsonl.");
    return;
  }
  const data = await unpack(JSON.parse(document.getElementById("data").textContent));
  // Places in a question, and in its rows: questions.py writes them in this order.
  const [SECTION, TASK, CATEGORY, NAME, TURN, REPEAT, PROMPT, ROWS] = [0, 1, 2, 3, 4, 5, 6, 7];
  const [METHOD, TEXT, TOKENS, ROUNDS, ACCEPTED, PREFILL, DECODE, SAME, FIRST, GAP, FINISH] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
  const PAGE = 50;
  const vanilla = data.methods.indexOf("vanilla");
  const several = data.questions.some((q) => q[REPEAT] > 1);
  let limit = PAGE, sorting = null, open = new Set();

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const rowOf = (question, method) => question[ROWS].find((row) => row[METHOD] === method);
  const total = (row) => (row && row[DECODE] !== null && row[PREFILL] !== null ? row[PREFILL] + row[DECODE] : null);
  const perToken = (row) => (total(row) && row[TOKENS] ? total(row) / row[TOKENS] : null);
  const speedup = (question, row) => {
    const base = perToken(rowOf(question, vanilla)), own = perToken(row);
    return base && own ? base / own : null;
  };
  const tau = (row) => (row && row[ROUNDS] ? (row[TOKENS] - 1) / row[ROUNDS] : null);
  const number = (value, digits = 2, unit = "") => (value === null || value === undefined ? "–" : value.toFixed(digits) + unit);
  const time = (ms) => (ms === null || ms === undefined ? "–" : ms >= 1000 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(1) + " ms");
  const place = (q) => data.tasks[q[TASK]] + (data.categories[q[CATEGORY]] === null ? "" : " / " + data.categories[q[CATEGORY]]);
  const name = (q) => q[NAME] + (q[TURN] > 1 ? `, turn ${q[TURN]}` : "") + (several ? `, repeat ${q[REPEAT]}` : "");
  const answer = (row) => (row && row[TEXT] !== null ? data.texts[row[TEXT]] : null);

  function output(row) {
    if (!row || row[METHOD] === vanilla || row[SAME] === null) return "–";
    if (row[SAME]) return "same";
    const tie = row[GAP] === null ? "" : row[GAP] <= 0.001 ? ", a near-tie" : `, logit gap ${row[GAP]}`;
    return `differs at token ${row[FIRST]}${tie}`;
  }

  // -- filters -------------------------------------------------------------------------------------------------

  function select(label, key, options) {
    const choices = options.map(([value, text]) => make("option", { value }, text));
    form.append(make("label", {}, label + " ", make("select", { name: key }, ...choices)));
  }

  if (data.sections.length > 1) select("Part", "section", data.sections.map((title, i) => [i, title]));
  select("Task", "task", [["", "all"], ...data.tasks.map((task, i) => [i, task])]);
  const methods = data.methods.map((label, i) => [i, label]).filter(([i]) => i !== vanilla);
  if (methods.length) select("Compare vanilla with", "method", methods);
  form.append(make("label", { class: "check" }, make("input", { type: "checkbox", name: "differing" }), " only differing outputs"));
  form.append(make("label", {}, "Find ", make("input", { type: "search", name: "find", placeholder: "question or text", autocomplete: "off" })));
  const count = make("output", { "aria-live": "polite" });
  form.append(count);

  const chosen = (key) => form.elements[key]?.value ?? "";
  const method = () => (methods.length ? Number(chosen("method")) : vanilla);

  function wanted(q) {
    if (data.sections.length > 1 && q[SECTION] !== Number(chosen("section"))) return false;
    if (chosen("task") !== "" && q[TASK] !== Number(chosen("task"))) return false;
    if (form.elements.differing.checked && rowOf(q, method())?.[SAME] !== 0) return false;
    const find = chosen("find").trim().toLowerCase();
    if (!find) return true;
    const texts = [rowOf(q, vanilla), rowOf(q, method())].map((row) => answer(row) ?? "");
    return [name(q), place(q), ...texts].some((text) => text.toLowerCase().includes(find));
  }

  // -- the list ------------------------------------------------------------------------------------------------

  // heading, whether it is text, the key to sort by, the cell
  const COLUMNS = [
    ["question", true, name, name],
    ["task", true, place, place],
    ["prompt tokens", false, (q) => q[PROMPT], (q) => String(q[PROMPT])],
    ["output tokens", false, (q, r) => r?.[TOKENS] ?? null, (q, r) => String(r?.[TOKENS] ?? "–")],
    ["vanilla's time", false, (q) => total(rowOf(q, vanilla)), (q) => time(total(rowOf(q, vanilla)))],
    ["method's time", false, (q, r) => total(r), (q, r) => time(total(r))],
    ["speedup", false, (q, r) => speedup(q, r), (q, r) => number(speedup(q, r), 2, "x")],
    ["τ (bonus included)", false, (q, r) => tau(r), (q, r) => number(tau(r))],
    ["output against vanilla's", false, (q, r) => (r?.[SAME] === 0 ? r[FIRST] : null), (q, r) => output(r)],
  ];

  const headings = COLUMNS.map(([title], index) => {
    const button = make("button", { type: "button" }, title);
    const heading = make("th", { scope: "col", "aria-sort": "none" }, button);
    button.addEventListener("click", () => {
      sorting = [index, nextOrder(heading, COLUMNS[index][1])];
      show();
    });
    return heading;
  });
  const body = make("tbody");
  list.append(make("table", { class: "sortable texts2" }, make("thead", {}, make("tr", {}, ...headings)), body));

  function line(q, index) {
    const row = rowOf(q, method());
    const button = make("button", { type: "button", "aria-expanded": "false", "aria-controls": `q${index}` }, name(q));
    const cells = COLUMNS.slice(1).map(([, isText, , cell]) => isText ? make("th", { scope: "row" }, make("span", {}, cell(q, row))) : make("td", {}, cell(q, row)));
    if (row?.[SAME] === 0) cells.at(-1).className = "differs";
    const tr = make("tr", {}, make("th", { scope: "row" }, button), ...cells);
    const toggle = () => {
      const opened = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(opened));
      if (opened) { tr.after(detail(q, index)); open.add(q); } else { tr.nextElementSibling.remove(); open.delete(q); }
    };
    button.addEventListener("click", toggle);
    return [tr, toggle];
  }

  function show() {
    const found = data.questions.filter(wanted);
    if (sorting) {
      const [column, sign] = sorting, key = COLUMNS[column][2], m = method();
      const keyed = found.map((q) => [key(q, rowOf(q, m)), q]).sort((a, b) => compareKeys(a[0], b[0], sign));
      found.splice(0, found.length, ...keyed.map((pair) => pair[1]));
    }
    const before = open;
    open = new Set();
    body.replaceChildren();
    found.slice(0, limit).forEach((q, index) => {
      const [tr, toggle] = line(q, index);
      body.append(tr);
      if (before.has(q)) toggle();
    });
    count.textContent = `${found.length} of ${data.questions.length} questions`;
    more.hidden = found.length <= limit;
  }

  // -- one question --------------------------------------------------------------------------------------------

  function detail(q, index) {
    const box = make("div", { class: "detail-box" }, texts(q), numbers(q));
    return make("tr", { class: "detail", id: `q${index}` }, make("td", { colspan: COLUMNS.length }, box));
  }

  function texts(q) {
    const base = answer(rowOf(q, vanilla)), row = rowOf(q, method()), own = answer(row);
    const both = make("div", { class: "texts" });
    if (base === null && own === null) both.append(make("div", {}, make("p", {}, "No texts were kept in this run.")));
    else if (base === own || row === undefined || row[METHOD] === vanilla) both.append(panel("vanilla" + (base === own ? ` and ${data.methods[method()]}, the same text` : ""), base ?? ""));
    else {
      const at = base === null || own === null ? -1 : firstDifference(base, own);
      both.append(panel("vanilla", base, at), panel(data.methods[method()], own, at));
    }
    return both;
  }

  function panel(title, text, at = -1) {
    const p = make("p", { dir: "auto" });
    if (text === null) p.append("–");
    else if (at < 0) p.append(text);
    else p.append(text.slice(0, at), make("mark", {}, text.slice(at) || "⟨ends here⟩"));
    return make("div", {}, make("h4", {}, title), p);
  }

  /** Where two texts part, never inside a character that takes two units. */
  function firstDifference(a, b) {
    let at = 0;
    while (at < a.length && at < b.length && a[at] === b[at]) at += 1;
    const before = a.charCodeAt(at - 1);
    return before >= 0xd800 && before <= 0xdbff ? at - 1 : at;
  }

  function numbers(q) {
    const heads = ["method", "tokens", "rounds", "accepted", "τ (bonus included)", "prefill", "decode", "total", "speedup", "ended by", "output"];
    const rows = q[ROWS].map((r) => make("tr", {}, make("th", { scope: "row" }, make("span", {}, data.methods[r[METHOD]])), ...[
      String(r[TOKENS]), String(r[ROUNDS] || "–"), String(r[ACCEPTED]), number(tau(r)), time(r[PREFILL]), time(r[DECODE]), time(total(r)),
      number(speedup(q, r), 2, "x"), r[FINISH] ?? "–", output(r),
    ].map((text) => make("td", {}, text))));
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers of ${name(q)}` },
      make("table", { class: "sortable texts1 small" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  form.addEventListener("input", () => { limit = PAGE; show(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { limit += PAGE; show(); });
  show();
})();
