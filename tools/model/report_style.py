"""The style sheet of the report. Blue is the reference, orange the candidate: hues apart for every kind of eye."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --soft: #63686f; --line: #dfe1e4;
  --reference: #0063b0; --candidate: #d35400; --bad: #b3261e; --bad-paper: #fdecea; --good: #1b7a43;
  --good-paper: #e6f5ec; --note-paper: #fff6dc; --bar: #7d93ad; --int8: #0f8a6d; --fp16: #3b78c4; --fp32: #c98a1b; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --card: #1f2226; --ink: #e7e9ec; --soft: #9ba2ab;
  --line: #363b42; --reference: #58b0ff; --candidate: #ff9a4d; --bad: #ff8a80; --bad-paper: #3a1e1c; --good: #6fd69b;
  --good-paper: #17301f; --note-paper: #362f18; --bar: #6f86a3; --int8: #35b795; --fp16: #6ea3e6; --fp32: #e0ad4e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); } code { overflow-wrap: anywhere; font-size: 13px; }
.verdict { display: inline-block; font-weight: 600; padding: 3px 12px; border-radius: 999px; margin: 8px 0; }
.verdict.passed { color: var(--good); background: var(--good-paper); }
.verdict.failed { color: var(--bad); background: var(--bad-paper); }
.box { border-radius: 8px; padding: 10px 18px; margin: 12px 0; } .box ul { margin: 4px 0; padding-left: 20px; }
.box.failures { background: var(--bad-paper); border-left: 5px solid var(--bad); }
.box.notes { background: var(--note-paper); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 9px 13px; }
.facts span { display: block; color: var(--soft); font-size: 13px; }
.facts b { font-size: 18px; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 50%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; font-size: 13px; color: var(--soft); } td.n, th.n { text-align: right; }
td code, td .verdict { white-space: nowrap; margin: 0; }
td details { margin: 0; } td details code { white-space: normal; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--soft); margin: 4px 0 10px; }
.legend i { display: inline-block; width: 20px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: 6px; } .legend i.block { height: 11px; border: 0; border-radius: 2px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
figcaption { padding: 8px 12px; font-size: 13px; overflow-wrap: anywhere; } figcaption b { font-weight: 600; }
svg { display: block; } svg.picture { width: 100%; height: 280px; background: #8883; }
.zooms { display: flex; gap: 2px; margin-top: 2px; } svg.zoom { width: 33.3%; aspect-ratio: 1; background: #8884; }
.picture rect, .zoom rect { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.picture rect { pointer-events: all; }
rect.reference { stroke: #1e90ff; } rect.candidate { stroke: #ff7a1a; stroke-dasharray: 5 4; }
rect.alone { stroke: #ff2d55; stroke-width: 4; } rect.below { stroke-opacity: .45; }
.lost { padding: 40px 12px; text-align: center; color: var(--soft); }
.chart { width: 100%; max-width: 720px; height: auto; } .chart.wide { max-width: 960px; }
.chart text { fill: var(--soft); font: 12px system-ui, sans-serif; } .chart.wide text { font-size: 11px; }
.chart .grid { stroke: var(--line); } .chart .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.chart polyline { fill: none; stroke-width: 2.5; } polyline.reference { stroke: var(--reference); }
polyline.candidate { stroke: var(--candidate); stroke-dasharray: 6 4; }
.bar { fill: var(--bar); } .bar.over { fill: var(--bad); }
.share { width: 200px; height: 12px; border-radius: 2px; overflow: hidden; }
.dtype-int8 { fill: var(--int8); background: var(--int8); } .dtype-fp16 { fill: var(--fp16); background: var(--fp16); }
.dtype-fp32 { fill: var(--fp32); background: var(--fp32); } rect[class^=dtype-] { fill-opacity: .95; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--soft); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow: auto;
  max-height: 480px; font-size: 12.5px; }
"""
