"""The style sheet of a report: light and dark by the reader's setting, wide and narrow by the width of the window."""

STYLE = """
:root{--back:#f6f7f9;--card:#fff;--text:#1c2330;--quiet:#5d6778;--line:#dfe3ea;--good:#11734b;--warning:#8a5a00;--bad:#b3261e;
--c0:#2563c9;--c1:#c2410c;--c2:#15803d;--c3:#a21caf;--c4:#0e7490;--c5:#92700c}
@media (prefers-color-scheme:dark){:root{--back:#12151b;--card:#1b2028;--text:#e6e9ef;--quiet:#9aa4b5;--line:#323a47;--good:#4ccf94;
--warning:#e6b455;--bad:#ff8a80;--c0:#78a9ff;--c1:#ff9d66;--c2:#62d58a;--c3:#e58bf0;--c4:#5fd0e3;--c5:#e0c05a}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px 16px 40px}
h1{font-size:1.5rem;margin:.2em 0 .6em;overflow-wrap:anywhere}
h2{font-size:1.02rem;margin:0 0 .6em;overflow-wrap:anywhere}
.card,.guarantee,.figures{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;
margin:0 0 16px;min-width:0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px;margin-bottom:16px}
.cards .card{margin:0}
.guarantee{border-left:6px solid var(--good)}
.guarantee.warning,.card.warning{border-left:6px solid var(--warning)}
.guarantee.bad{border-left-color:var(--bad)}
.guarantee p{margin:0}
.tag{font-weight:700;text-transform:uppercase;letter-spacing:.06em;font-size:.8rem;color:var(--good)}
.warning .tag{color:var(--warning)}
.bad .tag{color:var(--bad)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:14px}
.figures b{display:block;font-size:1.5rem;line-height:1.2}
.figures span,.quiet,footer{color:var(--quiet);font-size:.88rem}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--quiet);font-size:12.5px}
.grid{stroke:var(--line);stroke-width:1}
.y-tick,.bar-name{text-anchor:end}
.x-tick{text-anchor:middle}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
svg .limit-name{fill:var(--bad)}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}
.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}
.dot.c0,.bar.c0{fill:var(--c0)}.dot.c1,.bar.c1{fill:var(--c1)}.dot.c2,.bar.c2{fill:var(--c2)}
.dot.c3,.bar.c3{fill:var(--c3)}.dot.c4,.bar.c4{fill:var(--c4)}.dot.c5,.bar.c5{fill:var(--c5)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.45em}
.key.c0{background:var(--c0)}.key.c1{background:var(--c1)}.key.c2{background:var(--c2)}
.key.c3{background:var(--c3)}.key.c4{background:var(--c4)}.key.c5{background:var(--c5)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;font-size:.85rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;width:100%}
td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td:first-child{color:var(--quiet);white-space:nowrap}
"""
