"""What the house style can count."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "mgk"
OPS = SOURCE / "ops"
KERNELS = OPS / "triton" / "kernels"
LONGEST_FUNCTION = 80
LONGEST_KERNEL = 120
"""Lines after the signature."""
MOST_PARAMETERS = 13


def functions(*, in_kernels: bool) -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(OPS.rglob("*.py")):
        if path.is_relative_to(KERNELS) == in_kernels:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    yield f"{path.relative_to(OPS)}:{node.name}", node


def body_lines(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.body[0].lineno + 1


def test_no_function_is_long():
    found = {name: node.end_lineno - node.lineno + 1 for name, node in functions(in_kernels=False)}
    assert not {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION}


def test_no_kernel_is_long():
    found = {name: body_lines(node) for name, node in functions(in_kernels=True)}
    assert not {name: lines for name, lines in found.items() if lines > LONGEST_KERNEL}


def test_no_helper_of_a_kernel_has_many_parameters():
    """A helper is what another kernel calls, or what begins with an underscore."""
    kernels = dict(functions(in_kernels=True))
    called = {
        call.func.id
        for node in kernels.values()
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    found = {
        name: len(node.args.args)
        for name, node in kernels.items()
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (node.name.startswith("_") or node.name in called)
    }
    assert found
    assert not {name: count for name, count in found.items() if count > MOST_PARAMETERS}


def test_sections_of_docstrings_begin_a_line():
    """An argument a line: run together, nobody finds one."""
    section = re.compile(r"^\s+(?:Args|Returns|Raises): \S", re.MULTILINE)
    assert not [str(path) for path in SOURCE.rglob("*.py") if section.search(path.read_text())]
