"""One self-contained HTML file about one run, or several side by side, made from the files that runs leave."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import Config, load_config
from .errors import UserError
from .jobs.files import write_text
from .runs.records import read_records
from .runs.summary import human_bytes, of_clients, per_client_and_round, seconds
from .versions import __version__, check_schema

#: of clients whose labels are drawn; more are said in a sentence
MOST_CLIENTS = 200
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")


@dataclass
class Shown:
    """What is known of one run.

    Attributes:
        name: that tells it from the others. summary: empty while the run goes on.
    """

    name: str
    folder: Path
    config: Config
    history: list[dict[str, Any]]
    data: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return bool(self.summary)


def read_runs(folders: Iterable[str | Path]) -> list[Shown]:
    """The runs in ``folders``; of the folder of a comparison, each of its methods.

    Raises:
        UserError: a folder without a run, a file that cannot be read, or the same run twice.
    """
    found: list[Path] = []
    for given in map(Path, folders):
        inside = sorted(p.parent for p in given.glob("*/config.yaml")) if (given / "comparison.json").exists() else []
        if not inside and not (given / "config.yaml").is_file():
            raise UserError(f"{given} holds no run: there is no config.yaml; give the outdir of a run")
        found += inside or [given]
    if len({p.resolve() for p in found}) < len(found):
        raise UserError(f"the same run is named twice among {', '.join(map(str, found))}")
    configs = [load_config(folder / "config.yaml") for folder in found]
    methods = [config.federate.method for config in configs]
    names = methods if len(set(methods)) == len(methods) else [str(folder) for folder in found]
    return [_read(*one) for one in zip(names, found, configs)]


def _read(name: str, folder: Path, config: Config) -> Shown:
    files: dict[str, dict[str, Any]] = {}
    for file in ("data.json", "summary.json"):
        try:
            files[file] = json.loads((folder / file).read_text(encoding="utf-8")) if (folder / file).exists() else {}
        except ValueError as error:
            raise UserError(f"{folder / file} cannot be read: {error}") from error
        if files[file]:
            check_schema(files[file], folder / file)
    history = read_records(folder / "rounds.jsonl", up_to=10**9)
    return Shown(name, folder, config, history, files["data.json"], files["summary.json"])


def write_page(runs: Sequence[Shown], out: str | Path, renew: float = 0.0) -> Path:
    """Write the page.

    Args:
        renew: seconds after which a browser loads it again; 0: never.
    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the report's curves need plotly: pip install 'fs-lowrank[report]'") from None
    sections = [
        ("summary", "Figures", _figures(runs)),
        ("curves", "Curves", _curves(runs)),
        ("data", "Data", _data(runs)),
        ("clients", "Clients", _clients(runs)),
        ("failures", "Rounds with failures", _failures(runs)),
        ("settings", "Settings", _settings(runs)),
    ]
    sections = [section for section in sections if section[2]]
    title = ", ".join(run.name for run in runs)
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{name}</h2>{content}</section>' for key, name, content in sections)
    going = [run.name for run in runs if not run.ended]
    state = f"<p class=note>still running, or ended early: {html.escape(', '.join(going))}</p>" if going else ""
    refresh = f'<meta http-equiv="refresh" content="{math.ceil(renew)}">' if renew and going else ""
    write_text(
        Path(out),
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><header><h1>{html.escape(title)}</h1><nav>{links}</nav></header><main>{state}{body}</main>"
        f"<footer>fs-lowrank {__version__}</footer><script>{_SCRIPT}</script></body></html>\n",
    )
    return Path(out)


# -- parts -----------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], sortable: bool = True) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f'<td class=number data-value="{value!r}">{value:.4g}</td>'
        number = isinstance(value, int) and not isinstance(value, bool)
        return f"<td{' class=number' if number else ''}>{html.escape(str(value))}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    kind = " class=sortable" if sortable else ""
    return f"<div class=wide><table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _figures(runs: Sequence[Shown]) -> str:
    metrics = sorted({name for run in runs for name in _last(run)})
    best = sorted({f"{split} {m}" for run in runs for r in run.history for split, v in r["metrics"].items() for m in v})
    accuracies = [name for name in best if name.endswith(" acc")]
    head = ["run", "rounds", *metrics, *(f"best {name}" for name in accuracies), "majority class"]
    head += ["sent up", "sent down", "training s"]
    rows = []
    for run in runs:
        last = _last(run)
        values: list[Any] = [run.name, f"{len(run.history)} of {run.config.federate.total_round_num}"]
        values += [last.get(name, "") for name in metrics]
        for name in accuracies:
            split, _, metric = name.rpartition(" ")
            seen = [r["metrics"][split][metric] for r in run.history if metric in r["metrics"].get(split, {})]
            values.append(max(seen) if seen else "")
        majority = run.summary.get("majority")
        values.append("" if majority is None else majority)
        sent = per_client_and_round(run.history) if run.history else {"uplink": 0.0, "downlink": 0.0}
        values += [human_bytes(sent["uplink"]), human_bytes(sent["downlink"])]
        values.append(round(seconds(run.history)["training"], 1) if run.history else "")
        rows.append(values)
    return _table(head, rows) + (
        "<p class=note>Metrics are those of the last evaluated round. The best of several evaluations on test data is "
        "too high an estimate; choose rounds by validation data. Bytes are per client and round.</p>"
    )


def _last(run: Shown) -> dict[str, float]:
    last: Mapping[str, Any] = next((r["metrics"] for r in reversed(run.history) if r["metrics"]), {})
    return {f"{split} {name}": value for split, values in last.items() for name, value in values.items()}


def _plot(name: str, traces: list[dict[str, Any]], layout: Mapping[str, Any]) -> str:
    # "<" would end the script where a name holds "</script>".
    content = json.dumps({"data": traces, "layout": layout}).replace("<", "\\u003c")
    place = f'<div class=plot id="plot-{name}"></div>'
    return f'{place}<script type="application/json" data-plot="plot-{name}">{content}</script>'


def _axes(title: str, x: str, y: str) -> dict[str, Any]:
    return {"title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _curves(runs: Sequence[Shown]) -> str:
    if not any(run.history for run in runs):
        return "<p>No round has ended yet.</p>"
    kinds = sorted({(split, m) for run in runs for r in run.history for split, v in r["metrics"].items() for m in v})
    parts = []
    for split, metric in kinds:
        for x, label in (("round", "round"), ("bytes", "bytes sent by all clients, both ways"), ("seconds", "seconds")):
            if x != "round" and (split, metric) != ("test", "acc"):
                continue
            traces = []
            for i, run in enumerate(runs):
                points = [
                    (at[x], r["metrics"][split][metric])
                    for r, at in zip(run.history, _positions(run))
                    if metric in r["metrics"].get(split, {})
                ]
                traces.append(_trace(run, i, points))
                majority = run.summary.get("majority")
                if (split, metric) == ("test", "acc") and majority is not None and points and i == 0:
                    ends = [points[0][0], points[-1][0]]
                    line = {"color": "#888", "dash": "dot"}
                    traces.append({"x": ends, "y": [majority] * 2, "mode": "lines", "name": "majority", "line": line})
            layout = _axes(f"{split} {metric} by {x}", label, f"{split} {metric}")
            parts.append(_plot(f"{split}-{metric}-{x}", traces, layout))
    traces = [_trace(run, i, [(r["round"], r["loss"]) for r in run.history]) for i, run in enumerate(runs)]
    parts.append(_plot("loss", traces, _axes("training loss by round", "round", "mean over the clients of the round")))
    return "".join(parts) + (
        "<p class=note>The training loss is that of the clients on their own data while they train. With skewed "
        "classes it falls within a round even if the global model learns nothing.</p>"
    )


def _positions(run: Shown) -> list[dict[str, float]]:
    sent = spent = 0.0
    found = []
    for record in run.history:
        sent += record["uplink_bytes"] + record["downlink_bytes"]
        spent += sum(record["seconds"].values())
        found.append({"round": record["round"], "bytes": sent, "seconds": spent})
    return found


def _trace(run: Shown, i: int, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    colour = _COLOURS[i % len(_COLOURS)]
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "mode": "lines+markers",
        "name": run.name,
        "line": {"color": colour},
    }


def _data(runs: Sequence[Shown]) -> str:
    rows = []
    for run in (r for r in runs if r.data):
        sizes = sorted(c["size"] for c in run.data["clients"])
        dropped = "; ".join(f"{count} ({why})" for why, count in run.data["skipped"].items()) or "none"
        held = [f"{len(run.data[s]['rows'])} {s}" for s in ("validation", "test") if s in run.data]
        clients = f"{len(sizes)}, of {sizes[0]} to {sizes[-1]}"
        rows.append([run.name, run.data["source"], sum(sizes), clients, ", ".join(held) or "none", dropped])
    head = ["run", "source", "training rows", "clients", "held out", "rows left out"]
    return _table(head, rows) if rows else ""


def _clients(runs: Sequence[Shown]) -> str:
    parts, seen = [], set()
    for run in (r for r in runs if r.data):
        clients = run.data["clients"]
        key = json.dumps([c.get("labels", c["size"]) for c in clients])
        if key in seen:
            continue
        seen.add(key)
        title = "samples of each client" if len(seen) == 1 and len(runs) == 1 else f"samples of each client: {run.name}"
        drawn = clients[:MOST_CLIENTS]
        names = list(drawn[0].get("labels", {})) or ["samples"]
        traces = [
            {
                "type": "bar",
                "name": name,
                "x": [c["client"] for c in drawn],
                "y": [c["labels"][name] if "labels" in c else c["size"] for c in drawn],
            }
            for name in names
        ]
        parts.append(_plot(f"clients-{len(seen)}", traces, {**_axes(title, "client", "samples"), "barmode": "stack"}))
        if len(clients) > MOST_CLIENTS:
            parts.append(f"<p class=note>The first {MOST_CLIENTS} of {len(clients)} clients are drawn.</p>")
    rows = []
    for run in runs:
        for r in run.history[-1:]:
            for client, count in r["client_uplink_bytes"].items():
                part = sum(int(client) in record["clients"] for record in run.history)
                size = next((c["size"] for c in run.data.get("clients", []) if c["client"] == int(client)), "")
                rows.append([run.name, int(client), size, part, human_bytes(count)])
    own = [[run, *run.history[-1]["metrics"]["client_test"].items()] for run in runs if _own(run)]
    scores = "".join(
        _table([f"{run.name}: {of_clients([run.summary])}", "value"], [list(pair) for pair in pairs])
        for run, *pairs in own
    )
    if not parts:
        return ""
    last = _table(["run", "client of the last round", "samples", "rounds that it took part in", "sent up"], rows)
    return "".join(parts) + scores + (last if rows else "")


def _own(run: Shown) -> bool:
    return bool(run.history) and "client_test" in run.history[-1]["metrics"]


def _failures(runs: Sequence[Shown]) -> str:
    rows = []
    for run in runs:
        for r in run.history:
            rows += [[run.name, r["round"], f["client"], f["kind"], f["reason"]] for f in r["failed"]]
            if r.get("skipped"):
                rows.append([run.name, r["round"], "", "left out", r["skipped"]])
    return _table(["run", "round", "client", "what", "reason"], rows) if rows else ""


def _settings(runs: Sequence[Shown]) -> str:
    given = [run.config.decisive() for run in runs]
    plain = load_config({"federate.client_num": 1}).decisive()
    keys = sorted(k for k in {k for g in given for k in g} if any(g.get(k) != plain.get(k) for g in given))
    differ = {k for k in keys if len({json.dumps(g.get(k), sort_keys=True, default=str) for g in given}) > 1}
    keys.sort(key=lambda k: (k not in differ, k))
    rows = [[("≠ " if k in differ else "") + k, *("" if g.get(k) is None else str(g[k]) for g in given)] for k in keys]
    note = "<p class=note>Keys at their default are left out." + (
        " ≠: the runs differ.</p>" if len(runs) > 1 else "</p>"
    )
    return _table(["key", *(run.name for run in runs)], rows) + note


_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--paper:#fff;--line:#ddd;--soft:#666;--link:#2563eb}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--paper:#161616;--line:#3a3a3a;--soft:#a0a0a0;--link:#8ab4ff}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
header,main,footer{max-width:72rem;margin:auto;padding:0 1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem}
nav{display:flex;flex-wrap:wrap;gap:1rem}a{color:var(--link)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line)}
th{text-align:left;white-space:nowrap}.sortable th{cursor:pointer}td.number{text-align:right}
.note,footer{color:var(--soft)}.plot{width:100%;height:22rem}
"""
_SCRIPT = """
const dark=matchMedia('(prefers-color-scheme: dark)').matches,ink=dark?'#e8e8e8':'#1c1c1c',grid=dark?'#3a3a3a':'#ddd';
document.querySelectorAll('script[data-plot]').forEach(s=>{const p=JSON.parse(s.textContent),l=p.layout;
for(const a of ['xaxis','yaxis'])l[a]={...l[a],gridcolor:grid,automargin:true};
Plotly.newPlot(s.dataset.plot,p.data,{...l,paper_bgcolor:'transparent',plot_bgcolor:'transparent',font:{color:ink},
legend:{orientation:'h',y:-.25},margin:{t:40,r:10}},{responsive:true,displaylogo:false})});
document.querySelectorAll('table.sortable').forEach(t=>t.querySelectorAll('th').forEach((h,i)=>h.onclick=()=>{
const v=r=>{const c=r.cells[i],n=parseFloat(c.dataset.value??c.textContent);return isNaN(n)?c.textContent:n};
const up=h.dataset.up!=='1';h.dataset.up=up?'1':'0';const rows=[...t.tBodies[0].rows];
rows.sort((a,b)=>{const x=v(a),y=v(b);return (x>y?1:x<y?-1:0)*(up?1:-1)});rows.forEach(r=>t.tBodies[0].append(r))}));
"""
