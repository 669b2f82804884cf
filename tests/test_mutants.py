import ast

import pytest
from mutants import mutable, mutations, survivors

TOY = '''"""A toy of 1 module."""

def area(width: "tuple[int, 2]", scale: int | None = None) -> int | None:
    """Width times 2, if width > 0."""
    if width > 0:
        return width * 2
    raise ValueError(f"{width + 1} is too small")

if __name__ == "__main__":
    print(area(1 + 1))
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "mutants_toy").mkdir()
    (tmp_path / "mutants_toy" / "shapes.py").write_text(TOY)
    (tmp_path / "tests" / "mutants_toy").mkdir(parents=True)
    return tmp_path


def write_test(root, body):
    text = f"from mutants_toy.shapes import area\n\n\ndef test_area():\n    {body}\n"
    (root / "tests" / "mutants_toy" / "test_shapes.py").write_text(text)


def changes(source):
    tree = ast.parse(source)
    return [f"{ast.unparse(old)} -> {ast.unparse(new)}" for old in mutable(tree) for new in mutations(old)]


def test_a_mutant_survives_exactly_where_no_test_looks(root):
    write_test(root, "assert area(5) == 10 and area(1) == 2")
    assert survivors(root, "mutants_toy.shapes") == (
        4,
        ["mutants_toy/shapes.py:5:8  if width > 0:  width > 0 -> width >= 0"],
    )


def test_limit_takes_evenly_spread_mutants(root):
    write_test(root, "area(5)")  # notices no change
    count, lines = survivors(root, "mutants_toy.shapes", limit=2)
    assert count == 2
    assert [line.split("  ")[-1] for line in lines] == ["width > 0 -> width >= 0", "width * 2 -> width // 2"]


def test_failing_tests_are_refused(root):
    write_test(root, "assert area(5) == 11")
    with pytest.raises(RuntimeError, match=r"test_shapes\.py must pass before mutants_toy\.shapes is mutated"):
        survivors(root, "mutants_toy.shapes")


def test_an_imported_module_is_refused(root):
    with pytest.raises(RuntimeError, match="already imported"):
        survivors(root, "mutants")


def test_only_code_is_mutated():
    assert changes(TOY) == ["width > 0 -> width >= 0", "0 -> 1", "width * 2 -> width // 2", "2 -> 3"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a + b", ["a + b -> a - b"]),
        ("a ** b", ["a ** b -> a * b"]),
        ("a += b", ["a += b -> a -= b"]),
        ("a < b == c", ["a < b == c -> a <= b == c", "a < b == c -> a < b != c"]),
        ("a and b or c", ["a and b or c -> (a and b) and c", "a and b -> a or b"]),
        ("not a", ["not a -> a"]),
        ("min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("a.any()", ["a.any() -> a.all()"]),
        ("True", ["True -> False"]),
        ("0.0", ["0.0 -> 1.0"]),
        ("1.5", ["1.5 -> 3.0"]),
        ("a: int | None = 7", ["7 -> 8"]),
        ("a is b, 'text', None", []),
    ],
)
def test_mutations(source, expected):
    assert changes(source) == expected
