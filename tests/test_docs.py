"""The documentation says what is there: the tree, the directions of imports, links, and programs that run."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import TensorDataset

import dpulr
from dpulr import cli

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dpulr"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DEEPER = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
OWN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/pitfalls.md", "docs/decisions.md")]


# --- the tree -------------------------------------------------------------------------------------------------------------
def printed_tree() -> list[Path]:
    """The paths of docs/architecture.md, from its indented list."""
    block = re.search(r"```text\n(src/dpulr/.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert block is not None
    folders: list[str] = []
    paths = []
    for line in block.group(1).splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        paths.append(Path("".join(folders)))
    return paths


def test_the_tree_is_the_tree_on_disk() -> None:
    printed = printed_tree()
    assert len(printed) == len(set(printed))
    assert [str(path) for path in printed if not (ROOT / path).exists()] == []
    on_disk = {path.relative_to(ROOT) for path in SOURCE.rglob("*.py")}
    assert sorted(str(path) for path in on_disk - set(printed)) == []


def test_the_answer_comes_first() -> None:
    """A new reader finds where noise is added in the first ten lines, and finds it there in the code."""
    first = "\n".join((ROOT / "docs" / "architecture.md").read_text().splitlines()[:10])
    assert "`FittedMechanism.privatise`" in first
    assert "mechanisms/base.py" in first
    assert "`noised`" in first
    assert "self.fitted.privatise(" in (SOURCE / "engine.py").read_text()
    base = (SOURCE / "mechanisms" / "base.py").read_text()
    assert re.search(r"class FittedMechanism.*?def privatise\(.*?return noised\(.*?\ndef noised\(", base, re.DOTALL)


def test_the_stages_of_a_step_stand_in_the_order_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    step = next(
        node
        for node in ast.walk(ast.parse((SOURCE / "engine.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    )
    names = ["drawing.taken", "draw_public", "sum_of_bounded_signals", "privatise", "gradients", "optimizer.step"]
    for text in (ast.unparse(step), page[page.index("## A step") : page.index("## The way")]):
        places = [text.index(name) for name in names]
        assert places == sorted(places)


# --- imports --------------------------------------------------------------------------------------------------------------
@cache
def imports() -> dict[str, set[str]]:
    """For every module of src all that it imports, inside functions too."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        names = found[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} imports by dots"
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def within(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


NO_TORCH = tuple(
    f"dpulr.{name}"
    for name in ("accounting", "plan", "solver", "sampling", "validate", "search", "errors", "files", "paper.nominal")
)
BELOW = ["dpulr.cli", "dpulr.runs", "dpulr.engine", "dpulr.parts", "dpulr.distributed", "dpulr.mechanisms", "dpulr.model"]
LISTS_OF_NAMES = ("dpulr.accounting.public",)
FORBIDDEN = [
    *((room, tuple(BELOW[: BELOW.index(room)])) for room in BELOW[1:]),
    ("dpulr.audit", ("dpulr.cli", "dpulr.runs")),
    ("dpulr.runs", ("dpulr.audit",)),
    ("dpulr.engine", ("dpulr.audit",)),
    ("dpulr.mechanisms", ("dpulr.audit", "dpulr.paper")),
    ("dpulr.model", ("dpulr.audit", "dpulr.paper", "dpulr.accounting", "dpulr.plan")),
    ("dpulr.accounting", (*BELOW, "dpulr.audit", "dpulr.plan", "dpulr.solver")),
    ("dpulr.paper", ("dpulr.cli", "dpulr.runs", "dpulr.audit", "dpulr.engine")),
    ("dpulr", ("reproduction", "benchmarks", "examples", "tests")),
]


@pytest.mark.parametrize(("room", "others"), FORBIDDEN, ids=lambda value: value if isinstance(value, str) else "+".join(value))
def test_imports_point_one_way(room: str, others: tuple[str, ...]) -> None:
    modules = {module: names for module, names in imports().items() if within(module, room) and module not in LISTS_OF_NAMES}
    wrong = [(module, name) for module, names in modules.items() for name in names if within(name, *others)]
    assert wrong == []


def test_what_prices_and_plans_imports_no_torch() -> None:
    """Neither itself nor through what it imports."""
    wrong = [(m, name) for m, names in imports().items() if within(m, *NO_TORCH) for name in names if within(name, "torch")]
    assert wrong == []
    modules = sorted(module for module in imports() if within(module, *NO_TORCH))
    program = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


def test_paper_is_mentioned_by_the_lists_of_names_alone() -> None:
    users = {m for m, names in imports().items() if not within(m, "dpulr.paper") and any(within(n, "dpulr.paper") for n in names)}
    assert users <= {"dpulr", "dpulr.accounting.public"}


# --- words and links ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*\.md|)#([^)\s]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        lines = re.findall(r"^#+ (.*)", text, re.MULTILINE)
        headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in lines}
        assert anchor in headings, f"{target}#{anchor}"


def test_sections_that_the_code_names_exist() -> None:
    sections = set(re.findall(r"^## (\d+)\.", (ROOT / "docs" / "theory.md").read_text(), re.MULTILINE))
    for path in SOURCE.rglob("*.py"):
        named = re.findall(r"sections? (\d+)(?: (?:and|to) (\d+))?", path.read_text())
        assert {number for pair in named for number in pair if number} <= sections, path.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("page", [*OWN, ROOT / "docs" / "theory.md"], ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`mechanisms/base.py`, `src/dpulr/...`, `tests/...` in backquotes."""
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|json|toml))`", page.read_text())
    assert [name for name in named if not any((base / name).exists() for base in (ROOT, SOURCE, ROOT / "docs"))] == []


def test_the_glossary_has_the_words_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    words = re.findall(r"^\| ([a-z ]+) \|", page[page.index("## Glossary") :], re.MULTILINE)[1:]
    assert len(words) == len(set(words)) >= 20
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py")).lower()
    assert [word for word in words if word not in code and word.replace(" ", "_") not in code] == []


def test_the_readme_quotes_the_results() -> None:
    """Every pair of accuracies is a row of docs/results.md, rounded."""
    quoted = re.findall(r"^\| [^|]+ \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = re.findall(
        r"\| ([\d.]+) ± [\d.]+ \(3\) \|.* ([\d.]+) ± [\d.]+ \(3\) \|$", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE
    )
    assert len(quoted) == 4
    for pair in quoted:
        assert any(all(abs(float(q) - float(r)) <= 0.0501 for q, r in zip(pair, row, strict=True)) for row in rows), pair


def test_the_readme_quotes_the_speed() -> None:
    """Its sentence is that of the rows of docs/performance.md."""
    said = r"takes ([\d.]+) to ([\d.]+) times as long as plain SGD,\s+([\d.]+) to ([\d.]+) times"
    found = re.search(said, (ROOT / "README.md").read_text())
    assert found is not None
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| mlp, batch \d+ \| hidden-direction, K = 1 \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    plain, ghost = zip(*[(float(a), float(b)) for a, b in rows], strict=True)
    assert [min(plain), max(plain), min(ghost), max(ghost)] == [float(number) for number in found.groups()]


def test_the_tests_that_a_page_names_exist() -> None:
    there = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        text = page.read_text()
        assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in there] == []
        assert [name for name in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / name).exists()] == []


# --- programs -------------------------------------------------------------------------------------------------------------
QUICK = ("README", "CONTRIBUTING", "architecture", "pitfalls", "decisions", "accounting")
"""Pages whose programs run in the quick tier; those of the others in the slow one."""
SMALL = "import dpulr, numpy, torch; x, y = torch.randn(4), torch.tensor(0)\n"
BEFORE = {  # what a page takes as given
    "audit": SMALL
    + """
model, loss_fn = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.nn.CrossEntropyLoss(reduction="none")
inputs, targets = torch.randn(50, 4), torch.zeros(50, dtype=torch.int64)
""",
    "users": SMALL
    + """
model, loss_fn = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.nn.CrossEntropyLoss(reduction="none")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"x": numpy.zeros(4, dtype="float32"), "y": 1, "sender": i // 2} for i in range(1_000)]
dataset = dpulr.data.Columns(rows, inputs="x", target="y")
""",
    "cli": """
import numpy, dpulr.cli
images = numpy.zeros((2, 1, 28, 28), dtype="float32")
assert dpulr.cli.main(["train", "--steps", "2", "--evaluations", "1", "--out", "runs/fashion"]) == 0
""",
    "language-models": SMALL
    + """
model = torch.nn.Sequential(torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer, loss_fn = torch.optim.SGD(model[2].parameters(), lr=0.1), torch.nn.CrossEntropyLoss(reduction="none")
train = test = torch.utils.data.TensorDataset(torch.randn(500, 4), torch.arange(500) % 2)
""",
    "scale": """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
""",
}
AFTER = {
    "scale": "dist.destroy_process_group()\nfor name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): del os.environ[name]"
}


def blocks(page: Path, kind: str) -> list[str]:
    return [
        textwrap.dedent(block) for block in re.findall(rf"^ *```{kind}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


PROGRAMS = {f"{page.stem}-{i}": block for page in OWN for i, block in enumerate(blocks(page, "python"))}
WHOLE = {str(page.relative_to(ROOT)): page for page in [*PAGES, *DEEPER] if blocks(page, "python")}


def run(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    module = ModuleType("printed_program")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program, module.__name__, "exec"), vars(module))
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages open."""
    census = importlib.util.find_spec("xai")
    if census is None or census.origin is None:
        pytest.skip("the package xai has the census")
    shutil.copy(Path(census.origin).parent / "data" / "census.csv", tmp_path)
    shutil.copy(ROOT / "examples" / "adult.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortened(program: str) -> str:
    """Three steps where it trains for epochs, and few runs where it searches."""
    trains = "PrivacyEngine(" in program or "dpulr.tune(" in program
    return re.sub(r"\bruns=10\b", "runs=1.5", re.sub(r"epochs=\d+", "steps=3", program)) if trains else program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if p.stem in QUICK else pytest.mark.slow) for n, p in WHOLE.items()])
def test_the_programs_of_a_page_run(
    name: str, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as a reader would type them."""
    page = WHOLE[name]
    program = "\n".join([BEFORE.get(page.stem, ""), *blocks(page, "python"), AFTER.get(page.stem, "")])
    printed = run(shortened(program), capsys, monkeypatch)
    if page.stem == "from-opacus":  # every pain has an answer that keeps the guarantee, but a seed for the noise, which voids it
        said = [line for line in printed if line in ("certified", "nominal", "none")]
        assert said == ["certified"] * 16 + ["none", "certified"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_program_of_opacus_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The left column of docs/from-opacus.md, on fewer records."""
    pytest.importorskip("opacus")
    (program,) = blocks(ROOT / "docs" / "from-opacus.md", "py")
    before = """
import dpulr
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset
train, model = Subset(dpulr.data.load("mnist")[0], range(2_000)), dpulr.models.mlp()
"""
    (epsilon,) = run(before + program, capsys, monkeypatch)
    assert 0.5 < float(epsilon) < 1.05


# --- settings files and tutorials ---------------------------------------------------------------------------------------------
def test_settings_files_are_accepted(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toml blocks: a config of docs/cli.md by its own command line, a schema of docs/tables.md."""
    (job,) = blocks(ROOT / "docs" / "cli.md", "toml")
    (workplace / "job.toml").write_text(job)
    line = next(line for line in job.splitlines() if line.startswith("# job.toml: dpulr "))
    assert cli.main([*shlex.split(line.removeprefix("# job.toml: dpulr ")), "--dry-run"]) == 0
    (schema,) = blocks(ROOT / "docs" / "tables.md", "toml")
    (workplace / "schema.toml").write_text(schema)
    (workplace / "few.csv").write_text("".join((workplace / "census.csv").read_text().splitlines(keepends=True)[:20]))
    table = dpulr.data.read_table("few.csv", schema="schema.toml")
    assert len(table) == 19
    assert table.classes == ["<=50K", ">50K"]


def test_tutorials_are_those_of_their_scripts() -> None:
    """Pages are made by `make docs`; their programs are run by the tests above."""
    build = runpy.run_path(str(ROOT / "docs" / "build_tutorials.py"))
    scripts = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
    assert scripts
    assert [path.name for path in scripts if not build["up_to_date"](path)] == []


def test_formulas_in_sentences_are_typeset_on_the_site() -> None:
    typeset = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["_typeset"]
    text = (
        "<p>H_{a/2}(Q) &lt;= |x_i|^T_i, sigma0^2 -&gt; e^(-r x), sum_k b_k; <code>max_n^2</code>, <em>epsilon-greedy</em> (N)_+</p>"
    )
    assert typeset(text) == (
        "<p>H<sub>a/2</sub>(Q) ≤ |x<sub>i</sub>|<sup>T<sub>i</sub></sup>, σ<sub>0</sub><sup>2</sup> → e<sup>(-r x)</sup>, "
        "∑<sub>k</sub> b<sub>k</sub>; <code>max_n^2</code>, <em>epsilon-greedy</em> (N)<sub>+</sub></p>"
    )


def test_the_workflow_runs_what_is_there() -> None:
    """Its make targets, its tests, and the extras that these need: what they import without a way round."""
    lines = re.findall(r"- run: (.*)", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    targets = [name for line in lines if line.startswith("make ") for name in line.split()[1:]]
    assert {"test", "release", "docs"} <= set(targets)
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (tests,) = (line.split()[1:] for line in lines if line.startswith("pytest "))
    assert [path for path in tests if not (ROOT / path).exists()] == []
    (install,) = (line for line in lines if line.startswith("pip install"))
    assert "-c constraints.txt" in install
    files = [path for name in tests for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).glob("*.py")))]
    imported = {name for path in files for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)}
    for package, extra in {"dp_accounting": "rdp", "opacus": "baselines", "sklearn": "sklearn", "typer": "cli"}.items():
        assert package not in imported or re.search(rf"[\[,]{extra}[,\]]", install), package


def test_the_readme_prints_the_whole_statement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows is what the program prints, but for the numbers of a longer run."""
    statement, accuracy = run(shortened(PROGRAMS["README-0"]), capsys, monkeypatch)
    shown = re.search(r"```text\n(\(epsilon.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    *sentence, number = shown.group(1).split()
    assert _without_numbers(" ".join(sentence)) == _without_numbers(statement)
    assert re.fullmatch(r"0\.\d+", number)
    assert 0 <= float(accuracy) <= 1


def _without_numbers(text: str) -> str:
    return re.sub(r"epsilon = [\d.]+|after \d+ steps", "#", text)


@pytest.mark.slow
def test_the_readme_program_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh noise each time: the accuracy of single runs was 0.90 to 0.92."""
    statement, accuracy = run(PROGRAMS["README-0"], capsys, monkeypatch)
    assert "epsilon = 0.99" in statement
    assert float(accuracy) > 0.85


# --- what pages say about the library -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kappa", "same"), [(None, True), (0.1, False)])
def test_class_weights_change_nothing_where_signs_are_kept(kappa: float | None, same: bool) -> None:
    """docs/losses.md: the weights are the same, bit for bit, with the same randomness. A torch loss that has weights is refused."""
    found = [
        _trained(torch.nn.CrossEntropyLoss(weight=weight, reduction="none"), kappa) for weight in (None, torch.tensor([1.0, 64.0]))
    ]
    assert torch.equal(*found) is same


def _trained(loss: torch.nn.Module, kappa: float | None) -> torch.Tensor:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(200, 4), torch.randint(0, 2, (200,)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        dataset,
        lambda output, target: loss(output, target),
        mechanism=dpulr.HiddenDirection(kappa=kappa),
        batch_size=50,
        steps=5,
        noise_multiplier=1.0,
        insecure_noise_seed=1,
    )
    for x, y in engine.batches():
        engine.step(x, y)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
