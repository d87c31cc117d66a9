"""Pictures of studies: what matplotlib makes of names."""

import pytest

pytest.importorskip("plotly")

from plotly import graph_objects as go

from hpo import plots


def test_names_are_shown_as_they_are_written(tmp_path, monkeypatch):
    figure = go.Figure(go.Scatter(x=["$a_$", "b"], y=[1, 2], name="_study of $a_$")).add_scatter(x=[], y=[], name="no")
    figure.update_layout(title="$a_$", xaxis_title="key $a_$", showlegend=True)
    kept, write = [], plots.save
    monkeypatch.setattr(plots, "save", lambda page, path: kept.append(page) or write(page, path))
    plots.draw_png([figure], tmp_path / "slices.png")
    (axes,) = kept[0].axes
    texts = [axes.title, axes.xaxis.label, *axes.get_legend().get_texts(), *axes.get_xticklabels()]
    read = [text._preprocess_math(text.get_text()) for text in texts]
    assert read == [(text, False) for text in ("$a_$", "key $a_$", "_study of $a_$", "$a_$", "b")]
