"""How a report looks: its colours, shared by page and figures, and its style sheet.

The four data colours are distinguishable with every common form of colour blindness (they also differ in lightness),
and have a contrast of at least 4.5 to the light and the dark background.
"""

from __future__ import annotations

#: Also used in the figures; the page replaces them by variables of the same names.
LIGHT: dict[str, str] = {
    "ink": "#1b2430",
    "muted": "#566270",
    "grid": "#dde2e7",
    "train": "#0b62a4",
    "valid": "#0c7a66",
    "before": "#b4540a",
    "after": "#173f8a",
    "extra": "#84479c",
}
DARK: dict[str, str] = {
    "ink": "#e8ebee",
    "muted": "#a3adb8",
    "grid": "#333c46",
    "train": "#6db4f0",
    "valid": "#4cc4ab",
    "before": "#f0a35c",
    "after": "#9db8ff",
    "extra": "#cf9fe3",
}
_LIGHT_PAPER = {"paper": "#fdfdfc", "card": "#ffffff", "line": "#e3e6e9", "mark": "#ffe9a8", "code": "#f5f6f7"}
_DARK_PAPER = {"paper": "#14181d", "card": "#1b2027", "line": "#2e363f", "mark": "#5d4a12", "code": "#20262d"}


def _variables(*groups: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for group in groups for name, value in group.items())


#: The colours as variables of a page, for the report and for the live page.
COLOURS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT, _LIGHT_PAPER)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK, _DARK_PAPER)}}}}}\n"
)

CSS = (
    COLOURS
    + "".join(f".c-{name} b{{color:var(--{name})}}\n" for name in LIGHT)
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:break-word}
.page{max-width:68rem;margin:0 auto;padding:clamp(1.25rem,4vw,3.5rem) clamp(1rem,4vw,2.5rem) 4rem}
h1,h2,h3{line-height:1.2;text-wrap:balance;letter-spacing:-.012em}
h1{font-size:clamp(1.7rem,1.2rem + 2.4vw,2.75rem);margin:.4rem 0 1rem;max-width:24ch}
h2{font-size:1.4rem;margin:0 0 .35rem}
h3{font-size:1.05rem;margin:1.75rem 0 .5rem}
section{margin-top:3.25rem;padding-top:1.6rem;border-top:1px solid var(--line)}
p,.events li,figcaption{max-width:43rem}
p{margin:.5rem 0}
a{color:var(--train);text-underline-offset:.15em}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--train);outline-offset:3px;
border-radius:2px}
code,pre,kbd{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
.eyebrow{color:var(--muted);font-size:.85rem;letter-spacing:.02em;margin:0}
.lead{font-size:1.12rem;line-height:1.55}
.quiet,figcaption,caption{color:var(--muted);font-size:.9rem;line-height:1.5}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.3rem;margin:1.6rem 0 0;padding:0;font-size:.92rem}
nav a{display:inline-block;padding:.2rem 0}
.banner{border-left:4px solid var(--before);background:var(--code);padding:.7rem 1rem;margin:1.2rem 0;
border-radius:0 6px 6px 0}
.banner p{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,17rem),1fr));gap:1rem;
margin:1.8rem 0 .5rem;padding:0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.15rem 1.05rem}
.tile h2{font-size:.92rem;font-weight:600;letter-spacing:0;color:var(--muted);margin:0 0 .45rem}
.tile dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem .8rem;margin:0;align-items:baseline}
.tile dt{color:var(--muted);font-size:.88rem}
.tile dd{margin:0;white-space:nowrap}
.tile b{font-size:1.55rem;font-weight:650;letter-spacing:-.02em;line-height:1.25}
.tile .was b{font-weight:500;color:var(--before)}
.tile .now b{color:var(--after)}
.tile .was,.tile .now{display:contents}
.tile .range{color:var(--muted);font-size:.85rem;margin-left:.4rem}
.tile p{margin:.55rem 0 0;font-size:.85rem;color:var(--muted);line-height:1.45}
figure{margin:0;break-inside:avoid}
figure svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:inherit;fill:var(--ink)}
figcaption{margin-top:.35rem}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr));gap:2rem 1.75rem;
margin-top:1.4rem}
.wide{max-width:34rem;margin-top:1.4rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:1rem 0 0;padding:0;font-size:.92rem}
.legend li{overflow-wrap:anywhere}
.legend b::before{content:"";display:inline-block;width:1.1em;height:.25em;margin-right:.45em;vertical-align:.25em;
border-radius:2px;background:currentColor}
.scroll{container-type:inline-size;overflow-x:auto;margin:1.2rem 0;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.93rem;line-height:1.4}
caption{text-align:left;padding-bottom:.5rem}
caption span{display:block;max-width:min(43rem,100cqw)}
th,td{padding:.5rem .9rem .5rem 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);
white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th:last-child,td:last-child{padding-right:.2rem}
td.text,th.text{text-align:left;white-space:normal;min-width:14rem}
thead th{color:var(--muted);font-weight:600;font-size:.86rem;border-bottom-color:var(--muted)}
tbody th{font-weight:600}
td small,th small{display:block;font-weight:400;color:var(--muted);font-size:.8rem}
details{margin:.7rem 0;border:1px solid var(--line);border-radius:10px;background:var(--card)}
summary{cursor:pointer;padding:.75rem 1rem;font-weight:600;line-height:1.4}
summary .quiet{font-weight:400}
.inside{padding:0 1rem 1rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem 1.4rem}
.pair>div{min-width:0}
.pair h4,.inside h4{margin:.6rem 0 .4rem;font-size:.92rem;line-height:1.4}
h4 .verdict{font-weight:400;color:var(--muted)}
pre{margin:0;background:var(--code);border-radius:8px;padding:.8rem .9rem;white-space:pre-wrap;overflow-wrap:anywhere;
line-height:1.5;overflow:hidden}
.cut{color:var(--muted);font-style:italic}
mark{background:var(--mark);color:inherit;border-radius:3px;padding:.05em .15em;margin:0 -.05em}
.facts{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.3rem 1.4rem;margin:1rem 0;
font-size:.95rem}
.facts dt{color:var(--muted)}
.facts dd{margin:0;min-width:0;overflow-wrap:anywhere}
.events{padding-left:1.2rem;font-size:.95rem}
.events li{margin:.3rem 0}
footer{margin-top:3.5rem;padding-top:1rem;border-top:1px solid var(--line);color:var(--muted);font-size:.88rem}
@media (max-width:30rem){
body{font-size:.97rem}
.facts{grid-template-columns:1fr;gap:0}
.facts dd{margin-bottom:.55rem}
section{margin-top:2.4rem}
tbody th{white-space:normal;min-width:7.5rem}
#table-first-seen,#table-first-seen :is(tbody,caption){display:block}
#table-first-seen thead{position:absolute;clip-path:inset(50%)}
#table-first-seen tr{display:grid;grid-template-columns:1fr auto;border-bottom:1px solid var(--line);padding:.5rem 0}
#table-first-seen :is(td,th){border:0;padding:.1rem .4rem .1rem 0;text-align:left;white-space:normal;min-width:0}
#table-first-seen td:nth-child(2)::before{content:"step "}
#table-first-seen :is(td:nth-child(3),td.text){grid-column:1/-1}
}
@media print{
@page{margin:16mm 15mm}
:root{--paper:#fff}
html{font-size:9.5pt}
body{font-size:9.5pt;line-height:1.45}
.page{max-width:none;padding:0}
nav{display:none}
h1{font-size:22pt}
section{margin-top:18pt;padding-top:10pt}
h2,h3,h4,summary,caption{break-after:avoid}
.tiles{grid-template-columns:repeat(3,1fr);gap:8pt}
.tile{padding:8pt 9pt;break-inside:avoid}
.tile b{font-size:14pt}
.tile .range{display:block;margin:0}
.figures{grid-template-columns:1fr 1fr 1fr;gap:12pt 12pt}
figcaption{font-size:8pt}
.wide{max-width:11cm}
.pair{grid-template-columns:1fr 1fr;gap:10pt}
.scroll{overflow:visible;container-type:normal}
caption span{max-width:none}
table{font-size:8.5pt;width:100%}
th,td{padding:3pt 6pt 3pt 0;white-space:normal}
tr,li,.facts,.events li{break-inside:avoid}
section>p{break-after:avoid}
details,.scroll{break-inside:avoid}
details::details-content{content-visibility:visible;block-size:auto;height:auto}
details.bulk{display:none}
summary{list-style:none}
pre{font-size:7.5pt;break-inside:auto}
mark,.tile,.banner,pre{-webkit-print-color-adjust:exact;print-color-adjust:exact}
a{color:inherit;text-decoration:none}
}
"""
)
