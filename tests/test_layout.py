"""The shape of the package: which module may import which, and how long a function may be."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import tomli

PACKAGE = Path(__file__).parents[1] / "ds4cli"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Bottom to top. A module or subpackage imports from lower rows only; a new one needs a place here.
LAYERS = (
    ("errors", "escapes", "backend.disk", "help"),
    ("drafters.registry", "atomic", "console"),
    ("settings", "tokens", "arrays", "models.mlx_lm", "models.parts", "terminal", "ranks.number"),
    ("signals",),
    ("appended",),
    ("backend", "text", "hooks", "models"),
    ("caches", "sampling", "tools"),
    ("structured", "tape"),
    ("lanes",),
    ("rewind",),
    ("drafters", "ranks"),
    ("engine",),
    ("ranks.follower",),
    ("options", "prompt_cache"),
    ("generate", "chat", "bench", "inventory"),
    ("batch", "doctor", "llm_plugin"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
WITHOUT_MLX = (
    "appended.py",
    "atomic.py",
    "backend/disk.py",
    "backend/interpreter.py",
    "bench/macos.py",
    "errors.py",
    "escapes.py",
    "settings.py",
    "tokens.py",
    "drafters/drafter.py",
    "drafters/making.py",
    "drafters/registry.py",
    "drafters/policy.py",
    "drafters/costs.py",
    "drafters/ngram.py",
    "text/chat_template.py",
    "text/detokenizer.py",
    "text/editing.py",
    "text/reasoning.py",
    "text/stops.py",
    "text/tokenizer.py",
    "rewind/checkpoints.py",
    "rewind/plan.py",
    "chat/journal.py",
    "chat/transcript.py",
    "terminal.py",
    "options.py",
    "generate.py",
    "cli.py",
    "commands.py",
    "tools/parse.py",
    "tools/formats.py",
    "tools/declared.py",
    "structured/asked.py",
    "structured/missing.py",
    "structured/wanted.py",
    "batch/requests.py",
    "batch/grouping.py",
    "batch/replies.py",
    "batch/results.py",
    "batch/lines.py",
)
HEAVY = {
    "mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "jinja2", "llguidance",
    "prompt_toolkit",
}  # fmt: skip
MAX_FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    """`ds4cli/caches/plain.py` -> `caches/plain.py`."""
    return path.relative_to(PACKAGE).as_posix()


def top(path: Path) -> str:
    """The module or subpackage of ds4cli that has a place in LAYERS and that a file belongs to."""
    return place(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."))


def place(module: str) -> str:
    """The place in LAYERS of a dotted name: its own, or that of its first part."""
    two = ".".join(module.split(".")[:2])
    return two if two in RANKS else module.partition(".")[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST) -> list[str]:
    """Dotted names that the code imports when it runs, at its top or inside functions."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        found += imports(node)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path):
    """Guards: a cycle, or engine code that comes to depend on a command."""
    if top(path) == "__init__":
        return
    assert top(path) in RANKS, f"give {top(path)} its place in LAYERS"
    for name in imports(parsed(path)):
        package, _, rest = name.partition(".")
        target = place(rest)
        if package == "ds4cli" and target in RANKS and target != top(path):
            assert RANKS[target] < RANKS[top(path)], f"{name_of(path)} imports {name}"


def module_of(path: Path) -> str:
    """`ds4cli/caches/plain.py` -> `ds4cli.caches.plain`; folders are named, too."""
    dotted = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    return dotted.removesuffix(".__init__")


def modules_imported_by(path: Path, known: set[str]) -> set[str]:
    """The modules of ours that a file imports at its top or inside functions, itself left out."""
    found = set()
    for name in imports(parsed(path)):
        while name and name not in known:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module_of(path)}


def test_no_import_goes_round():
    """Guards: two modules that can only be understood, tested and moved together."""
    known = {module_of(path) for path in SOURCES}
    waits = {module_of(path): modules_imported_by(path, known) for path in SOURCES}
    while free := {name for name, others in waits.items() if not others & waits.keys()}:
        waits = {name: others for name, others in waits.items() if name not in free}
    assert {name: sorted(others & waits.keys()) for name, others in waits.items()} == {}


def test_help_loads_nothing_heavy():
    """Guards: an `__init__.py` that brings in more than it needs: `--help` takes seconds."""
    code = (
        "import sys; from ds4cli.cli import app\n"
        "try: app(['--help'])\n"
        "finally: print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split("\n")[-2].split())
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_folders_load_nothing_heavy():
    """Guards: a light module that takes seconds because of the folder that it lies in."""
    folders = ", ".join(module_of(path) for path in SOURCES if path.name == "__init__.py")
    code = f"import sys, {folders}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ds4cli" in done.stdout and not set(done.stdout.split()) & HEAVY, done.stderr


@pytest.mark.parametrize("name", WITHOUT_MLX)
def test_pure_modules_import_no_mlx(name):
    """Guards: logic that is tested without a model starts to need one, or `--help` to load MLX."""
    tree = parsed(PACKAGE / name)
    at_import = ast.Module([n for n in tree.body if not is_function(n)], [])
    found = [i for i in imports(at_import) if i.partition(".")[0] in ("mlx", "mlx_lm")]
    assert found == []


def declared() -> set[str]:
    """The distributions that pyproject.toml names, as import names."""
    project = tomli.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = (re.match(r"[\w-]+", wanted)[0] for wanted in itertools.chain(*lists))
    return {name.replace("-", "_") for name in names}


def test_what_is_imported_is_declared():
    """Guards: a package that is there only because another one needs it, until it does not."""
    found = {name.partition(".")[0] for path in SOURCES for name in imports(parsed(path))}
    assert found - set(sys.stdlib_module_names) - {"ds4cli"} <= declared()


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path):
    """Guards: a function that nobody can hold in their head."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_public_names():
    """Guards: a name that outside code imports disappears."""
    import ds4cli

    assert {ds4cli.Engine.__name__, ds4cli.Session.__name__, ds4cli.Settings.__name__} == {
        "Engine",
        "Session",
        "Settings",
    }
    with pytest.raises(AttributeError):
        ds4cli.nothing  # noqa: B018


def waits_for_ever(call: ast.Call) -> bool:
    """Whether it waits for a process or a thread, however long that takes."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, method = ast.unparse(call.func.value), call.func.attr
    if (owner, method) == ("subprocess", "run"):
        return "timeout" not in {keyword.arg for keyword in call.keywords}
    is_endless = method in ("wait", "communicate", "join") and not call.args and not call.keywords
    return is_endless and owner not in ("self", "zygote")  # these look at `batch_zygote.LIMIT_S`


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda p: p.name)
def test_no_test_waits_without_a_limit(path):
    """A run that hangs for ever, and does not say where."""
    calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    assert [call.lineno for call in calls if waits_for_ever(call)] == []
