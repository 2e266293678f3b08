"""The table of frontiers in docs/memory.md."""

from benchmarks.page.fit import section


def row(mib, ms):
    return {"total_mib": mib, "roofline_ms": ms}


def test_frontier_table_is_bold_where_nothing_is_better():
    cases = {
        "lstm": {
            "as given": row(100.0, 10.0),
            "storage lean": row(90.0, 9.0),
            "fused attention": row(120.0, 11.0),
            "jax.checkpoint, nothing_saveable": row(50.0, 20.0),
            "jax.checkpoint, dots_saveable": {"failed": "no"},
        },
        "gpt2": {"as given": row(10.0, 1.0)},
        "gpt2_whole": {"as given": row(10.0, 1.0)},
        "llama_layers": {"jax.checkpoint, nothing_saveable": row(50.0, 20.0)},
    }
    text = section({"cases": cases}, {})
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| GPT-2 124M, few layers | **as given** | 1.00x | 1.00x |",
        "| LSTM language model | **storage lean** | 0.90x | 0.90x |",
        "| LSTM language model | **jax.checkpoint, nothing_saveable** | 0.50x | 2.00x |",
    ]
