"""The aot suite: what it compiles, and what it finds wrong."""

from benchmarks import Options, aot
from benchmarks.results import Results


def test_strict_casts_with_a_float32_matmul_are_a_problem(tmp_path, monkeypatch):
    def figures(target, model, rival, sizes):
        return {"f32_matmuls": 3 * (model == "gpt2"), "temp_mib": 1.0}

    monkeypatch.setattr(aot, "figures", figures)
    results = Results.open(tmp_path / "aot.json", **aot.SETTINGS)
    problems = aot.run(Options(cases=("gpt2", "bert"), parts=("h100",)), results)
    assert set(results.cases["h100/bert"]) == set(aot.FIRST)
    assert problems == ["h100/gpt2, by hand, strict: 3 float32 matmuls"]
