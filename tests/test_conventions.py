"""Conventions of the code base: import direction, public names, docstrings, module sizes, checks in tests."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

import kfacpack as kp

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    ("errors", "_compat", "_random", "_torch"),
    ("format",),
    ("curvature.matrices",),
    ("curvature",),
    ("compression", "merging"),
    ("models", "tasks", "demo"),
    ("linearization",),
    ("estimation",),
    ("vectors",),
    ("training",),
    ("evaluation",),
    ("hub",),
    ("experiments",),
]
"""The rows of the table in CONTRIBUTING: a module imports from its own row and from those above."""


def layer_of(module: str) -> int:
    inner = module.removeprefix("kfacpack.")
    fitting = [
        (len(layer), row)
        for row, layers in enumerate(LAYERS)
        for layer in layers
        if inner == layer or inner.startswith(f"{layer}.")
    ]
    return max(fitting)[1]


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.parametrize("path", sorted((ROOT / "kfacpack").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    imported = {name for name in imports_of(path) if name.startswith(("kfacpack", "cli"))}
    assert not any(name.startswith(("kfacpack_cli", "cli")) for name in imported), "the library imports no command"
    if module == "kfacpack":
        return
    for name in imported - {"kfacpack"}:
        assert layer_of(name) <= layer_of(module), f"{module} imports {name}"


def test_every_public_name_can_be_imported():
    assert set(kp.__all__) <= set(dir(kp))
    for name in kp.__all__:
        assert getattr(kp, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = kp.nothing


def public_names() -> dict[str, str]:
    """Returns the module that defines each public name."""
    tree = ast.parse((ROOT / "kfacpack" / "__init__.pyi").read_text(encoding="utf-8"))
    return {
        alias.name: f"kfacpack/{(node.module or '').replace('.', '/')}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_types_of_public_functions_are_public():
    """Every class of kfacpack that a public function takes or returns has a public name."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "kfacpack").rglob("*.py")}
    classes = {node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    public = public_names()
    for name, module in public.items():
        path = ROOT / f"{module}.py"
        tree = trees[path if path.exists() else ROOT / module / "__init__.py"]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                arguments = [*node.args.args, *node.args.kwonlyargs]
                annotations = [argument.annotation for argument in arguments if argument.annotation]
                used = {
                    leaf.id
                    for annotation in [*annotations, *([node.returns] if node.returns else [])]
                    for leaf in ast.walk(annotation)
                    if isinstance(leaf, ast.Name) and leaf.id in classes
                }
                assert used <= public.keys(), f"{name}: {used - public.keys()}"


def function_in(value):
    """The function in a method, class method or context manager; None for anything else."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    return function if inspect.isfunction(function) and function.__module__.startswith("kfacpack") else None


def public_functions():
    """(name, function, docstrings) of public functions, constructors and methods.

    An override may leave the arguments to the docstring of the method that it overrides.
    """
    for name in kp.__all__:
        value = getattr(kp, name)
        if function := function_in(value):
            yield name, function, [function.__doc__]
        if not inspect.isclass(value):
            continue
        plain = not (dataclasses.is_dataclass(value) or issubclass(value, Exception))
        if plain and function_in(vars(value).get("__init__")):
            yield name, value.__init__, [value.__doc__]
        for attribute in sorted({attribute for base in value.__mro__ for attribute in vars(base)}):
            methods = [method for base in value.__mro__ if (method := function_in(vars(base).get(attribute)))]
            if methods and (attribute == "__call__" or not attribute.startswith("_")):
                yield f"{name}.{attribute}", methods[0], [method.__doc__ for method in methods]


def documented_arguments(docstring: str | None) -> list[str]:
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return re.findall(r"^ {4}(\*{0,2}\w+):", section[1], re.MULTILINE) if section else []


PUBLIC_FUNCTIONS = [pytest.param(function, docs, id=name) for name, function, docs in public_functions()]


@pytest.mark.parametrize(("function", "docs"), PUBLIC_FUNCTIONS)
def test_docstrings_list_the_arguments(function, docs):
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    names = [stars.get(parameter.kind, "") + parameter.name for parameter in parameters]
    expected = [name for name in names if name not in ("self", "cls")]
    assert next(filter(None, map(documented_arguments, docs)), []) == expected


@pytest.mark.parametrize(("function", "docs"), PUBLIC_FUNCTIONS)
def test_docstrings_describe_results_and_errors(function, docs):
    docstring = inspect.cleandoc(docs[0] or "")
    assert docstring
    returns_nothing = inspect.signature(function).return_annotation in ("None", inspect.Signature.empty)
    describes_result = re.search(r"\A(Returns|Yields) |^(Returns|Yields):", docstring, re.MULTILINE)
    assert returns_nothing or describes_result or len(docs) > 1
    raised = {
        node.exc.func.id
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    assert "Raises:" in docstring or not any(issubclass(getattr(kp, name, object), kp.KfacpackError) for name in raised)


def defined_types(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the classes and type aliases of a module, including those for type checkers alone."""
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.If():
                yield from defined_types([*node.body, *node.orelse])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                # Constants are written in capitals, type variables may be called T everywhere.
                if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):
                    yield name


def test_no_class_or_type_alias_is_defined_twice():
    seen: dict[str, Path] = {}
    for path in [*(ROOT / "kfacpack").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        for name in defined_types(ast.parse(path.read_text(encoding="utf-8")).body):
            assert name not in seen, f"{name}: {seen[name]} and {path}"
            seen[name] = path


def test_modules_are_few_and_short():
    paths = [*(ROOT / "kfacpack").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    assert len(paths) <= 170
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 500 for path in paths)


def test_pickles_are_read_in_one_place():
    reading = re.compile(r"^\s*(import|from) (pickle|dill|joblib|cloudpickle)\b|torch\.load\(", re.MULTILINE)
    paths = [path for top in ("kfacpack", "cli", "spec") for path in (ROOT / top).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in paths if reading.search(path.read_text(encoding="utf-8"))}
    assert readers == {"kfacpack/hub/unpickle_worker.py"}


GENERAL_ERRORS = {"Exception", "ValueError", "RuntimeError"} | {
    "KfacpackError", "MatrixError", "TaskVectorError", "BundleError", "CorruptTensor", "HubError", "SubtractionError"
}  # fmt: skip


def unspecific_checks(source: str) -> list[str]:
    """Returns the `refused(…)` and `pytest.raises(…)` that any error of a general class would satisfy."""
    tree = ast.parse(source)
    bound = {
        item.context_expr
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars
    }
    checks = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name, error = ast.unparse(call.func), ast.unparse(call.args[0]).rpartition(".")[2]
        numbers = (isinstance(fact, ast.Constant) and str(fact.value).isdigit() for fact in call.args[1:])
        if name == "refused":
            unspecific = all(numbers) and not call.keywords
        else:
            unspecific = name == "pytest.raises" and not call.keywords and call not in bound
        if unspecific and error in GENERAL_ERRORS:
            checks.append(f"line {call.lineno}: {ast.unparse(call)}")
    return checks


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_expected_errors_have_facts(path):
    """A test of an error fails if another error of the same class is raised."""
    assert unspecific_checks(path.read_text(encoding="utf-8")) == []


def test_checks_without_facts_are_found():
    weak = ["refused(kp.BundleError)", "refused(KfacpackError, '1', 2)", "pytest.raises(kp.HubError)"]
    strong = ["refused(BundleError, 'proj')", "refused(HubError, target='a')", "pytest.raises(HubError, match='a')"]
    for check in [*weak, *strong, "refused(SystemExit)"]:
        assert bool(unspecific_checks(f"with {check}:\n    pass")) == (check in weak), check
    assert not unspecific_checks("with pytest.raises(kp.BundleError) as caught:\n    pass")


def test_the_bundle_package_needs_no_torch():
    program = "import sys, kfacpack.format.reader, kfacpack.format.writer, kfacpack.curvature.verification\n"
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_example_predicts_the_drift_it_measures(tmp_path):
    result = python(ROOT / "examples" / "small_network.py", tmp_path / "small.kfac")
    assert result.returncode == 0, result.stderr
    predicted, measured = (float(line.split()[-1]) for line in result.stdout.splitlines())
    assert predicted == pytest.approx(measured, rel=0.05)
    assert kp.verify(tmp_path / "small.kfac", tmp_path / "small.safetensors").holds
