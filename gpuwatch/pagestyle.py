"""How the status page looks; it follows the reader's light or dark setting."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --dim: #667085; --line: #d9dee5;
  --data: #d9534f; --forward: #2e8b57; --backward: #3b78c4; --optimizer: #8e5bb5; --other: #98a2b3;
  --critical: #c0392b; --warn: #b7791f; --info: #2471a3; --good: #2e8b57; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --text: #e4e8ee; --dim: #98a2b3;
  --line: #323b47; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 68rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0; } h3 { font-size: .95rem; margin: 0; }
h4 { font-size: .8rem; margin: 1rem 0 .3rem; color: var(--dim); text-transform: uppercase; letter-spacing: .05em; }
p { margin: .2rem 0; } code { font-family: ui-monospace, monospace; font-size: .9em; }
pre { margin: .5rem 0; padding: .7rem; background: var(--page); border-radius: .4rem; overflow-x: auto; }
.dim { color: var(--dim); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.2rem;
  margin: 1rem 0; overflow-wrap: anywhere; }
.title { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; }
.badge { font-size: .75rem; font-weight: 600; padding: .05rem .55rem; border-radius: 1rem; color: #fff;
  background: var(--dim); white-space: nowrap; }
.badge.critical, .badge.killed { background: var(--critical); }
.badge.warn, .badge.exception { background: var(--warn); }
.badge.info { background: var(--info); } .badge.running { background: var(--good); }
.split { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; background: var(--line); }
.key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: .3rem 0; font-size: .85rem; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: .2rem; margin-right: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } td.number, th.number { text-align: right; }
.finding { border-left: .25rem solid var(--line); padding: .1rem 0 .1rem .9rem; margin: .8rem 0; }
.finding.critical { border-color: var(--critical); } .finding.warn { border-color: var(--warn); }
.finding.info { border-color: var(--info); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .3rem 0; }
dt { color: var(--dim); } dd { margin: 0; }
"""
