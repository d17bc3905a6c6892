"""The look of the page: one style sheet, light and dark, fit for paper."""

STYLE = """
:root{--bg:#fff;--soft:#f5f6f8;--text:#1b1f24;--dim:#5b6570;--rule:#d9dee4;--bad:#b3261e;--bad-bg:#fdecea;--good:#146c43;
--good-bg:#e7f4ed;--unsure:#7a5200;--unsure-bg:#fdf3dc;--mark:#ffd6cf;--mark-text:#6b0f08;--dot:#2f6fb3;--odd:#a86a00;--link:#1d5fa8}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14171b;--soft:#1d2127;--text:#e4e8ec;--dim:#9aa5b1;--rule:#343b44;--bad:#ff8a80;
--bad-bg:#3a1b19;--good:#7bd3a3;--good-bg:#152e22;--unsure:#f0c267;--unsure-bg:#33280f;--mark:#6b2a22;--mark-text:#ffe3df;
--dot:#74aee6;--odd:#f0b95a;--link:#8cbcf0}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
overflow-wrap:anywhere}
main{max-width:1120px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:2rem;line-height:1.2;margin:.1em 0 .4em;display:flex;align-items:center;gap:.45em}
h2{font-size:1.3rem;margin:2.2em 0 .5em;padding-bottom:.25em;border-bottom:1px solid var(--rule)}
h3{font-size:1.05rem;margin:.6em 0 .4em}h4{font-size:.95rem;margin:.2em 0}
p{margin:.4em 0}a{color:var(--link)}
header{padding:18px 24px;border-radius:10px;border-left:8px solid}
header.bad{background:var(--bad-bg);border-color:var(--bad)}header.good{background:var(--good-bg);border-color:var(--good)}
header.unsure{background:var(--unsure-bg);border-color:var(--unsure)}
.bad h1,.bad .sign{color:var(--bad)}.good h1,.good .sign{color:var(--good)}.unsure h1,.unsure .sign{color:var(--unsure)}
.sign{display:inline-grid;place-items:center;width:1.35em;height:1.35em;border:3px solid;border-radius:50%;font-size:.8em;flex:none}
.what{text-transform:uppercase;letter-spacing:.08em;font-size:.75rem;color:var(--dim);margin:0}
.bound{font-weight:600}.short{margin:.3em 0 .8em;padding-left:1.4em}
.about{display:flex;flex-wrap:wrap;gap:.4em 2.2em;margin:1em 0 0}.about div{min-width:0}
dt{font-size:.75rem;color:var(--dim);text-transform:uppercase;letter-spacing:.05em}dd{margin:0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}
table.grid{width:100%;min-width:780px}table.facts th{font-weight:400;color:var(--dim);max-width:340px}
th,td{text-align:left;padding:.42em .7em;border-bottom:1px solid var(--rule);vertical-align:top}
table.facts td,td:last-child{overflow-wrap:anywhere}thead th{font-weight:600;white-space:nowrap}
tbody th{font-weight:400;min-width:200px}.num{text-align:right;font-variant-numeric:tabular-nums}td{font-variant-numeric:tabular-nums}
tfoot th,tfoot td{border-top:2px solid var(--rule);border-bottom:0;font-weight:600}
.says,.sub,.gap{display:block;font-size:.8rem;font-weight:400;color:var(--dim)}.sub{white-space:nowrap}.none{color:var(--dim)}
.gap{color:var(--unsure);font-weight:600}.hit{background:var(--bad-bg);color:var(--bad)}
tr.missing td,tr.missing th{background:repeating-linear-gradient(135deg,transparent 0 7px,var(--unsure-bg) 7px 14px)}
tr.missing td{color:var(--unsure);font-weight:600}
article{border:1px solid var(--rule);border-left:5px solid var(--bad);border-radius:8px;padding:14px 18px;margin:16px 0}
.tags{display:flex;flex-wrap:wrap;gap:.4em 1em;color:var(--dim);font-size:.85rem;margin:0}
.tag{background:var(--bad-bg);color:var(--bad);padding:0 .6em;border-radius:1em;font-weight:600}
.chance{color:var(--dim)}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:14px;margin:.8em 0}
.side{background:var(--soft);border-radius:6px;padding:10px 14px;min-width:0}
.owner,.how{font-size:.82rem;color:var(--dim)}.cap{font-size:.75rem;text-transform:uppercase;letter-spacing:.05em;color:var(--dim);margin:.5em 0 .1em}
pre{margin:.2em 0;font:.85rem/1.45 ui-monospace,"SFMono-Regular",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre.text{max-height:22em;overflow:auto;contain:paint;unicode-bidi:isolate;background:var(--bg);border:1px solid var(--rule);border-radius:5px;padding:8px 10px}
.side details pre.text{max-height:9em}
pre.command{background:var(--soft);border:1px solid var(--rule);border-radius:5px;padding:8px 10px}
.empty,.cut{color:var(--dim);font-style:italic}.cut{display:block}
mark{background:var(--mark);color:var(--mark-text);font-weight:700;border-radius:2px;padding:0 1px;outline:1px solid var(--bad)}
details{margin:.5em 0}summary{cursor:pointer;color:var(--dim);font-size:.85rem}
.known{border-left:4px solid var(--odd);padding:4px 14px;margin:.8em 0}.known dl{margin:.4em 0}.known dd{margin:0 0 .5em}
.charts{display:grid;gap:18px}figure{margin:0}figcaption{font-weight:600}
figure>svg{width:100%;max-width:820px;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
.line{stroke:var(--rule);stroke-width:.6;fill:none}.axis{stroke:var(--dim);fill:none}.dot{fill:var(--dot);fill-opacity:.5}
.odd{fill:none;stroke:var(--odd);stroke-width:2}.mute{fill:var(--odd)}.bad path.bad,path.bad{fill:none;stroke:var(--bad);stroke-width:2.6;stroke-linecap:round}
.trend{fill:none;stroke:var(--text);stroke-width:1.8}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.4em;font-size:.82rem;color:var(--dim)}.legend svg{width:14px;height:14px;margin-right:.4em;vertical-align:-2px}
footer{margin-top:2.5em;border-top:1px solid var(--rule);color:var(--dim);font-size:.85rem}
@media print{main{max-width:none;padding:0}
header,.hit,mark,tr.missing td,tr.missing th{-webkit-print-color-adjust:exact;print-color-adjust:exact}
article,figure,tr{break-inside:avoid}pre.text,.side details pre.text{max-height:none;overflow:visible}h2,h3{break-after:avoid}
details::details-content{content-visibility:visible;display:block}summary{list-style:none}table.grid{min-width:0}}
"""

__all__ = ["STYLE"]
