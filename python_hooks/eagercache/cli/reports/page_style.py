"""How the report's page looks, in a light and a dark theme, and how its tables sort."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #5d6675; --back: #ffffff;
  --line: #d9dee6; --band: #f3f5f8; --kernels: #2563a8; --native: #9aa5b4; --open: #c98a1b;
  --modules: #6a4fb0; --aside: #3f8f6b; --rest: #dfe4eb; --lost: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e8ef; --soft: #98a3b3; --back: #14181f;
  --line: #313945; --band: #1c222b; --kernels: #5b9de0; --native: #6b7787; --open: #d9a441;
  --modules: #a48be0; --aside: #62bd94;
  --rest: #2b333f; --lost: #f2857d; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p.soft, caption, .key { color: var(--soft); } p.soft { margin: .2rem 0 1rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 1rem 0; }
.figures b { display: block; font-size: 1.7rem; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden;
  background: var(--rest); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; margin-top: .5rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.kernels { background: var(--kernels); } .native { background: var(--native); }
.open { background: var(--open); } .modules { background: var(--modules); }
.aside { background: var(--aside); } .rest { background: var(--rest); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
tbody tr:hover { background: var(--band); }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.lost { color: var(--lost); }
.text { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); margin-bottom: .3rem; }
summary { cursor: pointer; color: var(--soft); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg .axis { stroke: var(--line); } svg .kernels { fill: var(--kernels); }
svg .native { fill: var(--native); } svg .open { fill: var(--open); }
svg .failed { fill: var(--lost); } .failed { background: var(--lost); }
svg .steps { fill: none; stroke: var(--text); stroke-width: 1.5; }
svg rect.kernels:hover, svg rect.native:hover { opacity: .7; }
code { background: var(--band); padding: .1em .3em; border-radius: 3px; }
"""

SCRIPT = """
for (const head of document.querySelectorAll("th")) head.firstElementChild.onclick = () => {
  const up = head.ariaSort === "descending", place = head.cellIndex;
  for (const other of head.parentNode.children) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  const body = head.closest("table").tBodies[0];
  const of = row => row.cells[place].dataset.value;
  const words = head.className === "text";
  const rows = [...body.rows].sort((a, b) => words ? of(a).localeCompare(of(b)) : of(a) - of(b));
  body.append(...(up ? rows : rows.reverse()));
};
"""
