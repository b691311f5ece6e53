"""This module writes a result as a picture and as one self-contained HTML file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.bench.summary import select_figures
from forerun.plots import COLOURS, pyplot, save
from forerun.writing import written

PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>forerun bench: {{ server }}</title><style>
:root{color-scheme:light dark;--line:#d0d7de}@media(prefers-color-scheme:dark){:root{--line:#3d444d}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.wide{overflow-x:auto}
table{border-collapse:collapse}td,th{padding:.25rem .75rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.dark{display:none}
@media(prefers-color-scheme:dark){.dark{display:block}.light{display:none}}
</style><h1>{{ server }}</h1>
<p>{{ served_model }} ({{ engine or "engine unknown" }}), {{ tasks }} tasks of
{{ workload | join(", ") }}, {{ date }}</p>
<div class="light">{{ light | safe }}</div><div class="dark">{{ dark | safe }}</div>
<div class="wide"><table><tr><th></th>{% for load in loads %}<th>{{ load.load }}</th>{% endfor %}</tr>
{% for row in figures(loads) %}<tr><td>{{ row.words }}</td>
{% for load in loads %}<td>{{ shown(load.get(row.key)) }}</td>{% endfor %}</tr>{% endfor %}</table></div>
{% for load in loads if load.categories %}
{% set columns = figures(load.categories.values()) | selectattr("of_parts") | list %}
<h2>{{ load.load }}, by category</h2>
<div class="wide"><table><tr><th></th>{% for one in columns %}<th>{{ one.words }}</th>{% endfor %}</tr>
{% for name, part in load.categories.items() %}<tr><td>{{ name }}</td>
{% for one in columns %}<td>{{ shown(part.get(one.key)) }}</td>{% endfor %}</tr>{% endfor %}</table></div>{% endfor %}
{% for load in loads if load.failures %}<h2>{{ load.load }}, failures</h2>
<ul>{% for said, count in load.failures.items() %}<li>{{ count }} x {{ said }}</li>{% endfor %}</ul>{% endfor %}
<p>{{ source }}</p></html>
"""


def format_figure(value: float | None) -> str:
    """Format a figure: whole numbers as they are, others with three digits, None as an empty
    string.
    """
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def describe_source(record: Mapping[str, Any]) -> str:
    """Return a sentence that says where the acceptance figures are from; empty where no engine
    reported any.
    """
    found = [load for load in record["loads"] if "spec_decode_source" in load]
    if not found:
        return ""
    if not any(load.get("spec_decode_num_drafts") for load in found):
        return "The server drafted nothing."
    return f"Acceptance: {found[0]['spec_decode_source']}."


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw speed and time per token by load, and acceptance by drafted position where it is known."""
    save(_figure(record), path)


def write_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the tables and both pictures, light and dark, as one HTML file."""
    from jinja2 import Environment

    pictures = {"light": _svg(record, "default"), "dark": _svg(record, "dark_background")}
    page = Environment(autoescape=True).from_string(PAGE)
    text = page.render(
        {**record["about"], **record, **pictures},
        figures=select_figures,
        shown=format_figure,
        source=describe_source(record),
    )
    with written(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _svg(record: Mapping[str, Any], style: str) -> str:
    buffer = io.StringIO()
    with pyplot().style.context(style):
        figure = _figure(record)
        figure.tight_layout()
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True)
        pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figure(record: Mapping[str, Any]) -> Any:
    loads = record["loads"]
    accepted = [load for load in loads if load.get("spec_decode_per_position_acceptance_rates")]
    figure, panels = pyplot().subplots(1, 3 if accepted else 2, figsize=(12 if accepted else 8.5, 3.4))
    labels, places = [load["load"] for load in loads], range(len(loads))
    titles = {"output_throughput": "tokens per second", "median_tpot_ms": "ms per output token, median"}
    for axes, (key, title) in zip(panels, titles.items(), strict=False):
        axes.plot(places, [load.get(key) for load in loads], "o-", color=COLOURS[0], label="server")
        if all("baseline" in load for load in loads):
            axes.plot(places, [load["baseline"].get(key) for load in loads], "s--", color=COLOURS[2], label="baseline")
            axes.legend(frameon=False)
        axes.set_xticks(places, labels)
        axes.margins(y=0.15)
        axes.set(title=title)
        axes.set_ylim(bottom=0)
    for index, load in enumerate(accepted):
        rates = load["spec_decode_per_position_acceptance_rates"]
        colour = COLOURS[index % len(COLOURS)]
        panels[2].plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=load["load"])
        panels[2].set(ylim=(0, 1.02), title="accepted at a drafted position", xticks=range(1, len(rates) + 1))
        panels[2].legend(frameon=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure
