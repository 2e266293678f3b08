"""The totals that say how deep a library is, counted on a small one and on ours."""

import functools
import itertools
import re
import textwrap

import house
import pytest

MODULES = {
    "__init__.py": "from ._src import low\n",
    "__init__.pyi": "from ._src.low import short as short\n",
    "_src/__init__.py": "",
    "_src/low.py": '''
        """Low."""

        # a comment that stands alone
        AT = "mpjax._src.core.autocast.plan"  # and one that does not


        def short(a, *, b=1):
            """Returns a sum."""
            return (
                a
                + b
            )
    ''',
    "_src/core/autocast/graph.py": """
        class Op:
            kind: int
            ins: list
    """,
    "_src/core/autocast/plan.py": """
        from mpjax._src.core.autocast.graph import Op
        from mpjax._src import low

        def write(op, other):
            op.kind, other.name = 1, low.short(op.kind)
            op.ins.append(other)
            return Op(op.ins)
    """,
}


def library(folder, **changes):
    for name, text in {**MODULES, **changes}.items():
        path = folder / "mpjax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder


def test_house_totals_count_a_small_library(tmp_path):
    text = "\n".join(house.totals(library(tmp_path)))
    for line in (
        "rooms: 3, 2 floors, 2 arrows, no circle",
        "modules of core.autocast: 2, 2 floors, 1 arrows, no circle",
        "modules named by a string: 1, in ['low']",
        "lines of code: 16",
        "comments per 1,000 lines of code: 62",
        "functions: 2",
        "lines of code: median 4.5, p90 5, most 5",
        "arguments: median 2, p90 2, most 2",
        "names at the top: 1",
        "importers of core.autocast.graph: 1",
        "lines that write into Op, Value, Block, Body, Island: 2, in 1",
    ):
        assert line in text, text


def test_house_names_a_circle_of_imports(tmp_path):
    changes = {"_src/low.py": "from mpjax._src.core.autocast import plan\n"}
    (line, *_) = house.totals(library(tmp_path, **changes))
    assert "no floors" in line and "a circle: " in line and "low" in line and "autocast" in line


@pytest.mark.parametrize("name", ["core.autocast", "core.training", "optim", "mpjax/__main__"])
def test_house_finds_our_rooms(name):
    graph = house.graph_of(house.modules_of(house.ROOT))
    assert name in house.between(graph, house.room_of)


@functools.cache
def report():
    """Returns the report about our own house up to its totals of lines, which take seconds."""
    return [*itertools.takewhile(lambda t: "lines of code:" not in t, house.totals(house.ROOT))]


def total(name):
    """Returns the numbers of a line of the report about our own house."""
    (line,) = [line for line in report() if line.strip().startswith(name)]
    print(line)
    return [int(number) for number in re.findall(r"\d+", line.removeprefix(name))]


# Scripts are run above the instruments that examine them, and below the command.
@pytest.mark.parametrize(("name", "most"), [("rooms:", 9), ("modules of core.autocast:", 7)])
def test_our_house_has_few_floors(name, most):
    _, floors, *_ = total(name)
    assert floors <= most


def test_no_pass_of_the_planner_writes_into_what_others_share():
    assert total("lines that write into Op, Value, Block, Body, Island:")[0] == 0


def test_no_function_is_longer_than_a_page():
    functions = (
        f for path in house.modules_of(house.ROOT).values() for f in house.functions_of(path)
    )
    assert not [(name, length) for name, length, _ in functions if length > 60]


def test_few_modules_name_primitives():
    """Rules of operations stand in base/rules, as columns, and not in lists of names elsewhere."""
    assert total("primitives named by strings outside base/rules:")[0] <= 590


def test_no_string_names_a_module():
    assert total("modules named by a string:")[0] == 0
