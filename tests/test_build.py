"""The build: checks of the environment (tools/check_build_env.py), make, tools/bootstrap.py, the wheel, and tools/build_shims.py.

tools/bootstrap.py makes the virtual environment and installs torch, NVRTC and nvdisasm in it. tools/build_shims.py compiles the C++ side
("shim", one library per torch release), which the core library in Rust calls. tools/heartbeat.py prints a line while a command is silent.
Tests replace programs and pip by small fakes, so nothing is downloaded. `requirements(section)` returns the pins of tools/requirements.txt,
versions by package."""

import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import bootstrap
import build_shims
import check_build_env
import check_wheel
import heartbeat
import portable_linker
import torch_releases
import volta_fa
from build_shims import Progress, Step, check_exports, needed_from_shim, prerequisites, run_all, symbols
from processes import run_forked
from test_package import REPOSITORY, requirements


def program(path: Path, *lines: str) -> Path:
    """Writes a shell script that stands for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


# ---- tools/check_build_env.py: what the build needs ------------------------------------------------------------


@pytest.mark.parametrize("found, right", [((3, 9), False), ((3, 10), True), ((3, 14), True), ((3, 15), False)])
def test_check_python(found, right):
    problem = check_build_env.check_python(found)
    assert (problem is None) is right
    assert right or "needs Python 3.10 to 3.14" in problem


def test_check_toolchain(tmp_path):
    empty = {"PATH": str(tmp_path)}
    assert "install Rust" in check_build_env.check_cargo(empty["PATH"])
    assert "install g++" in check_build_env.check_compiler(empty)
    assert "CXX=clang++" in check_build_env.check_compiler({**empty, "CXX": "clang++ -stdlib=libc++"})
    for name in ("cargo", "g++"):
        program(tmp_path / name)
    assert check_build_env.problems(toolchain_only=True, environ=empty) == []


@pytest.mark.parametrize(
    "name, right", [("2.11.0", True), ("2.7.1+cu126", True), ("2.15.3", True), ("2.6.0+cu124", False), ("2.16.0", False), ("3.7.0", False)]
)
def test_check_torch(name, right, monkeypatch):
    monkeypatch.setattr(torch, "__version__", name)
    problem = check_build_env.check_torch()
    assert (problem is None) is right
    assert right or (f"torch {name} is installed" in problem and "needs torch 2.7 to 2.15: run" in problem and "torch==2.11.0" in problem)


def test_check_torch_that_is_missing_or_broken(monkeypatch):
    def fails(error):
        monkeypatch.setattr(check_build_env.importlib, "import_module", Mock(side_effect=error))
        return check_build_env.check_torch()

    assert "torch is not installed" in fails(ModuleNotFoundError("torch"))
    assert "does not load (libc10.so: gone)" in fails(ImportError("libc10.so: gone\nand much more"))


@pytest.mark.parametrize("versions, said", [({}, None),
                                            ({"setuptools": "65.5.0"}, "setuptools 65.5.0 is installed"),
                                            ({"setuptools-rust": None}, "setuptools-rust is not installed"),
                                            ({"setuptools": None}, "setuptools is not installed")])  # fmt: skip
def test_check_build_packages(versions, said, monkeypatch):
    installed = requirements("build") | versions

    def version(name):
        if installed[name] is None:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(check_build_env.importlib.metadata, "version", version)
    problem = check_build_env.check_build_packages()
    assert problem is None if said is None else (said in problem and "pip install setuptools==81.0.0" in problem)


def test_check_nvrtc(tmp_path, monkeypatch):
    assert "has no lib64/libnvrtc.so.12" in check_build_env.check_nvrtc({"VOLTA_FA_CUDA_HOME": str(tmp_path)})
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12").touch()
    assert check_build_env.check_nvrtc({"VOLTA_FA_CUDA_HOME": str(tmp_path)}) is None

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    problem = check_build_env.check_nvrtc({})
    assert "NVRTC 12.9 is not installed" in problem and "pip install nvidia-cuda-nvrtc-cu12==12.9.86" in problem
    for name in check_build_env._NVRTC_FILES:
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.setattr(check_build_env.importlib.metadata, "version", lambda name: "12.9.86")
    assert check_build_env.check_nvrtc({}) is None
    monkeypatch.setattr(check_build_env.importlib.metadata, "version", lambda name: "12.6.77")
    assert "NVRTC 12.6.77 is installed, volta_fa needs 12.9" in check_build_env.check_nvrtc({})


@pytest.fixture
def no_toolchain(tmp_path):
    """A PATH with what make and a shell need, and nothing that compiles."""
    for name in ("sh", "env", "awk", "touch", "cmp", "cp", "mv", "rm", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return str(tmp_path)


@pytest.mark.parametrize("command", ["setup.py --version", "tools/check_build_env.py"])
def test_a_missing_program_is_one_line_of_the_error(command, no_toolchain):
    env = {**os.environ, "PATH": no_toolchain}
    ran = subprocess.run([sys.executable, *command.split()], cwd=REPOSITORY, capture_output=True, text=True, env=env)
    assert ran.returncode == 1
    lines = ran.stderr.splitlines()
    assert all(line.startswith("volta_fa: ") for line in lines), ran.stderr
    assert "install Rust" in lines[0] and "install g++" in lines[1]


# ---- make and tools/bootstrap.py -------------------------------------------------------------------------------


def make(*arguments, **environ) -> subprocess.CompletedProcess:
    """Runs make without variables that the caller, or a make that runs the tests, may have set."""
    dropped = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "TORCH", "ARGS", "VIRTUAL_ENV", "CONDA_PREFIX")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run([shutil.which("make"), "-C", REPOSITORY, *arguments], capture_output=True, text=True, env={**kept, **environ})


def test_make_without_a_toolchain_stops_before_it_installs(tmp_path, no_toolchain):
    ran = make("run", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", PATH=no_toolchain)
    assert ran.returncode != 0 and not (tmp_path / "venv").exists()
    ours = next(line for line in ran.stderr.splitlines() if line.startswith("volta_fa: "))
    assert ours.startswith("volta_fa: cargo is not on PATH")


def find_python(environment: Path, **environ) -> subprocess.CompletedProcess:
    return subprocess.run(["/bin/sh", REPOSITORY / "tools/find_python.sh", environment], capture_output=True, text=True, env=environ)


def fake_python(folder: Path, name: str, version: str) -> Path:
    """A command that is a Python of this version, as far as find_python.sh asks: it runs the code after -c."""
    code = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); sys.executable = '{folder / name}'; exec(sys.argv[1])"
    return program(folder / name, f'exec {sys.executable} -c "{code}" "$2"')


def test_find_python(tmp_path):
    """First the environment of the checkout, then an active one, then PATH. With $PYTHON, that one or none."""
    path, active, ours = tmp_path / "bin", tmp_path / "active", tmp_path / "ours"
    assert "no Python 3.10 to 3.14 found" in find_python(ours, PATH=str(path)).stderr
    fake_python(path, "python3", "3.9")
    fake_python(path, "python3.11", "3.11")
    program(path / "python3.12", "echo a version manager without this version", "exit 127")
    assert find_python(ours, PATH=str(path)).stdout.strip() == str(path / "python3.11")
    fake_python(active / "bin", "python", "3.13")
    assert find_python(ours, PATH=str(path), VIRTUAL_ENV=str(active)).stdout.strip() == str(active / "bin/python")
    assert find_python(ours, PATH=str(path), CONDA_PREFIX=str(active)).stdout.strip() == str(active / "bin/python")
    fake_python(ours / "bin", "python", "3.10")
    assert find_python(ours, PATH=str(path), VIRTUAL_ENV=str(active)).stdout.strip() == str(ours / "bin/python")
    assert "is not a Python 3.10 to 3.14" in find_python(ours, PATH=str(path), PYTHON="python3").stderr


def test_torch_for_volta_comes_from_the_index_that_has_it():
    """Arguments: compute capabilities of this machine's GPUs. Wheels for CUDA 12.6 still have code for sm_70."""
    assert bootstrap.torch_arguments([]) == bootstrap.torch_arguments(["9.0"]) == ["torch==2.11.0"]
    assert bootstrap.torch_arguments(["7.0"]) == ["torch==2.11.0", "--index-url", "https://download.pytorch.org/whl/cu126"]
    assert bootstrap.torch_arguments(["7.5", "7.0"])[1:] == bootstrap.torch_arguments(["7.0"])[1:]


def test_gpu_capabilities(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.gpu_capabilities() == []
    program(tmp_path / "nvidia-smi", "echo 7.0", "echo 9.0")
    assert bootstrap.gpu_capabilities() == ["7.0", "9.0"]
    program(tmp_path / "nvidia-smi", "echo no driver; exit 9")
    assert bootstrap.gpu_capabilities() == []


@pytest.fixture
def installed(tmp_path, monkeypatch) -> list[tuple]:
    """Replaces an environment's creation and its pip. Returns the arguments of each `pip install`."""
    calls = []
    monkeypatch.setattr(bootstrap.Environment, "create", lambda self: None)
    monkeypatch.setattr(bootstrap.Environment, "site_packages", lambda self: tmp_path)
    monkeypatch.setattr(bootstrap.Environment, "pip_install", lambda self, *arguments: calls.append(arguments))
    return calls


def test_an_active_torch_is_linked_and_not_installed(tmp_path, monkeypatch, capsys, installed):
    environment = bootstrap.Environment(tmp_path / "venv")
    monkeypatch.setattr(bootstrap, "check_torch", lambda: None)
    bootstrap.link_active_torch(environment)
    assert str(Path(torch.__file__).parent.parent) in next(tmp_path.glob("*.pth")).read_text()
    assert f"using torch {torch.__version__}" in capsys.readouterr().out
    monkeypatch.setattr(bootstrap.Environment, "sees_torch", lambda self: True)
    bootstrap.install_torch(environment)
    assert not installed

    monkeypatch.setattr(bootstrap, "check_torch", lambda: "torch is not installed")
    bootstrap.link_active_torch(environment)
    assert not list(tmp_path.glob("*.pth"))
    monkeypatch.setattr(bootstrap.Environment, "sees_torch", lambda self: False)
    monkeypatch.setattr(bootstrap, "gpu_capabilities", lambda: ["7.0"])
    bootstrap.install_torch(environment)
    assert installed == [tuple(bootstrap.torch_arguments(["7.0"]))]
    assert "sm_70" in capsys.readouterr().out


def test_an_environment_sees_a_torch_that_loads():
    environment = bootstrap.Environment(Path(sys.prefix))
    assert environment.sees_torch()
    environment.python = Path("/usr/bin/python3") if Path("/usr/bin/python3").exists() else Path("/bin/false")
    assert not environment.sees_torch()


def test_another_torch_gets_an_environment_of_its_own(tmp_path, monkeypatch, capsys, installed):
    """`make TORCH=2.10.0` makes .venv-2.10.0 with that torch, whatever torch is active."""
    monkeypatch.setattr(bootstrap, "link_active_torch", lambda environment: installed.append("link"))
    for name in ("install_nvrtc", "install_nvdisasm"):
        monkeypatch.setattr(bootstrap, name, lambda environment: None)
    assert bootstrap.main([str(tmp_path), "nvrtc", "torch==2.10.0"]) == 0 and not installed
    assert bootstrap.main([str(tmp_path), "torch", "torch==2.10.0"]) == 0 and installed[0] == ("torch==2.10.0",)
    with pytest.raises(SystemExit):
        bootstrap.main([str(tmp_path), "torch", "torch==2.6.0"])
    assert "'torch==2.7.1'" in capsys.readouterr().err
    folder = REPOSITORY / ".venv-2.10.0"
    said = make("--dry-run", "--always-make", "test", "TORCH=2.10.0", f"PYTHON={sys.executable}").stdout
    assert f'tools/bootstrap.py "{folder}" torch torch==2.10.0' in said and f'VIRTUAL_ENV="{folder}"' in said
    assert '.venv"' in make("--dry-run", "--always-make", "test", f"PYTHON={sys.executable}").stdout


def test_the_oldest_transformers_is_installed_beside_the_newest_and_once(tmp_path, monkeypatch):
    calls = []

    def pip_install(self, *arguments):
        calls.append(arguments)
        (arguments[1] / "transformers").mkdir(parents=True)

    monkeypatch.setattr(bootstrap.Environment, "pip_install", pip_install)
    environment = bootstrap.Environment(tmp_path)
    bootstrap.install_folder(environment, "transformers-4.57")
    bootstrap.install_folder(environment, "transformers-4.57")
    assert [call[:2] for call in calls] == [("--target", tmp_path / "transformers-4.57")]
    (tmp_path / "transformers-4.57" / "requirements.txt").write_text("other pins")
    bootstrap.install_folder(environment, "transformers-4.57")
    assert len(calls) == 2
    assert requirements("transformers-4.57")["transformers"].startswith("4.57.") and requirements("test")["transformers"].startswith("5.")


def test_run_installs_less_than_test(tmp_path, monkeypatch, installed):
    """transformers, diffusers and xformers come with `make test` alone."""
    monkeypatch.setattr(bootstrap, "install_folder", lambda environment, name: installed.append(("folder", name)))
    for name in ("install_torch", "install_nvdisasm"):
        monkeypatch.setattr(bootstrap, name, lambda *_: None)
    assert bootstrap.main([str(tmp_path), "torch"]) == 0
    assert installed == [tuple(pin for section in ("build", "cli", "numpy") for pin in check_build_env.requirements(section))]
    installed.clear()
    assert bootstrap.main([str(tmp_path), "test"]) == 0
    assert installed == [tuple(check_build_env.requirements("test")), *(("folder", name) for name in bootstrap.FOLDERS)]
    for goal, installs_tests in (("run", False), ("test", True)):
        commands = make("--dry-run", "--always-make", goal, f"PYTHON={sys.executable}").stdout
        assert bool(re.search(r'bootstrap\.py "\S+" test$', commands, re.M)) == installs_tests


def test_make_compiles_while_it_installs():
    """Cargo waits for NVRTC alone, one goal has two jobs, and several goals follow each other."""
    database = make("--print-data-base", "--dry-run", "build", f"PYTHON={sys.executable}").stdout
    assert re.search(r"^core: \S+/\.nvrtc$", database, re.M) and re.search(r"^build: core \S+/\.ready$", database, re.M)
    assert re.search(r"^MAKEFLAGS = .*-j2", database, re.M)
    assert not re.search(r"^MAKEFLAGS = .*-j2", make("--print-data-base", "--dry-run", "lint", "docs").stdout, re.M)


@pytest.mark.parametrize("release, ours", [("12.8", False), ("13.0", False), ("13.1", True), ("14.0", True), (None, True)])
def test_the_simulator_gets_a_disassembler_that_knows_volta(release, ours, tmp_path, monkeypatch):
    """bootstrap.py takes nvdisasm from the installed triton up to release 13.0, the last that knows sm_70, else (`ours`) from a wheel."""

    def nvdisasm(triton: Path, release: str) -> None:
        program(triton / "backends/nvidia/bin/nvdisasm", f"echo Cuda compilation tools, release {release}, V{release}.1")

    installed = []

    def pip_install(self, *arguments):
        installed.append(arguments[-1])
        nvdisasm(arguments[1] / "triton", "12.8")

    if release:
        nvdisasm(tmp_path / "theirs", release)
    monkeypatch.setattr(bootstrap.Environment, "pip_install", pip_install)
    monkeypatch.setattr(bootstrap.Environment, "output", lambda self, code: str(tmp_path / "theirs") if release else "")
    environment = bootstrap.Environment(tmp_path / "venv")
    environment.folder.mkdir()
    for _ in range(2):  # once is enough
        bootstrap.install_nvdisasm(environment)
    assert installed == ([bootstrap.NVDISASM_WHEEL] if ours else [])
    assert bootstrap.nvdisasm_release(environment.folder / "nvdisasm") <= bootstrap.NVDISASM_NEWEST
    assert (environment.folder / "nvdisasm").resolve().is_relative_to(tmp_path / ("venv" if ours else "theirs"))


# ---- the wheel -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    metadata.version("setuptools") != requirements("build")["setuptools"], reason="not the pinned build environment (`make` has it)"
)
def test_the_wheel(tmp_path):
    """pip builds the wheel offline, for this torch and any Python. It has the simulator, imports, and computes."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, REPOSITORY], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"volta_fa-{re.escape(volta_fa.__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    installed = site / "volta_fa"
    assert all((installed / name).exists() for name in ("py.typed", "addresses.json", "check/predictions.json"))
    shim = f"torch-{torch_releases.minor(torch.__version__)}/libvolta_fa.so"
    assert sorted(str(path.relative_to(installed)) for path in installed.rglob("*.so")) == [build_shims.CORE, shim]
    assert wheel.stat().st_size <= check_wheel.LARGEST
    found, sources = ({path.relative_to(root) for path in root.rglob("*.py")} for root in (installed, REPOSITORY / "python/volta_fa"))
    assert found == sources
    code = "import volta_fa, torch; q = torch.ones(1, 2, 1, 8)\n"
    code += "print(torch.ops.volta_fa.fwd(q, q, q)[0].sum().item(), volta_fa.info()['simulator'], volta_fa.__file__)"
    ran = run_forked(["-c", code], {**os.environ, "PYTHONPATH": str(site)}, cwd="/")
    assert ran.stdout.split() == ["16.0", "True", str(installed / "__init__.py")], ran.stderr


def test_the_portable_linker_takes_the_systems_cxx_library_and_leaves_the_rest():
    """zig would link libraries of its own for these names, through which exceptions do not pass."""
    given = ["-shared", "-lgcc_s", "-lc", "a b.o", "-lstdc++"]
    found = portable_linker.arguments(given)
    assert found[0::2] == [given[0], given[2], found[4]] and found[3] == given[3]
    for path, name in ((Path(found[1]), "libgcc_s.so.1"), (Path(found[4]), "libstdc++.so.6")):
        assert path.is_absolute() and path.name == name and path.exists()


def test_versions_of_symbols_are_compared_with_what_old_systems_have():
    """The wheel runs on manylinux_2_28 systems: no symbol may need a newer glibc, libstdc++ or libgcc than those have."""
    old = ("GLIBC_2.28", "GLIBC_2.2.5", "GLIBCXX_3.4.21", "GLIBCXX_3.4.9", "CXXABI_1.3.9", "GCC_4.2.0")
    new = ("GLIBC_2.29", "GLIBC_2.34", "GLIBCXX_3.4.22", "CXXABI_1.3.11", "GCC_12.0.0", "OTHER_1")
    assert [check_wheel.is_old_enough(version) for version in (*old, *new)] == [True] * len(old) + [False] * len(new)
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_5_x86_64", "manylinux_2_34_x86_64", "linux_x86_64")
    assert [check_wheel.no_newer_than(platform, portable_linker.PLATFORM) for platform in platforms] == [True, True, False, False]
    symbols = check_wheel.needed_versions(volta_fa.library_path())
    assert {"GLIBC", "GLIBCXX", "CXXABI"} <= {name.split("_")[0] for name in symbols}


# ---- tools/build_shims.py ---------------------------------------------------------------------------------------


def test_reads_a_dependency_file() -> None:
    rule = "out/a.o: torch_ops/a.cpp \\\n /some\\ where/b.h \\\n c.h\n"
    assert prerequisites(rule) == [Path("torch_ops/a.cpp"), Path("/some where/b.h"), Path("c.h")]


def test_a_step_runs_again_only_after_a_change_of_an_input_or_of_the_command(tmp_path: Path) -> None:
    """The step's command appends a line, `text`, to the file `runs`. The dependency file out.d names a header as an input."""
    given, header, output, runs = (tmp_path / name for name in ("in", "header", "out.o", "runs"))
    for path in (given, header):
        path.touch()
        os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / "out.d").write_text(f"out.o: {header}\n")

    def make(text: str) -> int:
        Step(["sh", "-c", "echo $1 >> $2; : > $3", "sh", text, str(runs), str(output)], output, [given]).run()
        return len(runs.read_text().splitlines())

    assert [make("a"), make("a"), make("b"), make("b")] == [1, 1, 2, 2]
    for changed, expected in ((given, 3), (header, 4)):
        os.utime(changed, (time.time() + 60,) * 2)
        assert make("b") == expected
        os.utime(changed, (time.time() - 60,) * 2)


def test_an_error_ends_the_build_and_leaves_nothing_up_to_date(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = Step(["sh", "-c", "echo wrong >&2; : > $0; exit 1", str(tmp_path / "a.o")], tmp_path / "a.o", [])
    with pytest.raises(SystemExit, match="cannot make .*a.o"):
        run_all([wrong])
    assert "wrong" in capfd.readouterr().err and not wrong.is_up_to_date()


@pytest.mark.parametrize(("interval", "of", "lines"), [(1e9, 3, [0, 3]), (0, 2, [0, 1, 2]), (0, 0, [])])
def test_progress(interval: float, of: int, lines: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the first and last count of `of` units, and others after `interval` seconds."""
    monkeypatch.setattr(build_shims, "INTERVAL", interval)
    monkeypatch.delenv(heartbeat.PROGRESS, raising=False)
    progress = Progress(of)
    for _ in range(of):
        progress.advance()
    said = capsys.readouterr().err.split("\n")[:-1]
    assert [line.removeprefix("\r\033[Kvolta_fa: compiled ") for line in said] == [f"{n} of {of} C++ units" for n in lines]


def test_progress_reaches_a_file_where_pip_hides_standard_error(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(heartbeat.PROGRESS, str(tmp_path / "progress"))
    Progress(3)
    assert "compiled 0 of 3 C++ units\n" in (tmp_path / "progress").read_text() and not capsys.readouterr().err


#: A program that prints "a", is silent for 0.6 s, and appends a line to the progress file, which heartbeat.py must show.
SILENT = 'import os, time; print("a", end="", flush=True); time.sleep(0.6)\nopen(os.environ["VOLTA_FA_PROGRESS"], "a").write("said\\n")\n'


def heartbeat_of(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command under heartbeat.py, which prints a line after each 0.2 s of silence."""
    code = "import sys, heartbeat; heartbeat.INTERVAL = 0.2; sys.exit(heartbeat.run(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=REPOSITORY / "tools", timeout=60)


def test_a_silent_command_shows_that_it_runs() -> None:
    ran = heartbeat_of(sys.executable, "-c", f"{SILENT}raise SystemExit(3)")
    assert (ran.returncode, ran.stdout) == (3, "a") and "said\n" in ran.stderr
    assert re.match(r"\n(volta_fa: python.*: \d s\n)+", ran.stderr), ran.stderr
    assert heartbeat_of("sh", "-c", "echo b; kill -TERM $$").returncode == 128 + 15


def test_a_process_left_behind_does_not_hold_a_command() -> None:
    began = time.monotonic()
    assert heartbeat_of("sh", "-c", "sleep 30 & echo done").stdout == "done\n" and time.monotonic() - began < 20


def test_what_ends_a_heartbeat_ends_its_command(tmp_path: Path) -> None:
    """The command ends in its own way, with what it still has to say."""
    end = 'trap "echo ended; exit 7" TERM; echo started; while :; do sleep 0.1; done'
    beat = [sys.executable, REPOSITORY / "tools/heartbeat.py", "sh", "-c", end]
    with subprocess.Popen(beat, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.communicate(timeout=30)[0] == "ended\n"
    assert process.returncode == 7


def test_names_functions_that_a_shim_lacks_or_hides(tmp_path: Path) -> None:
    """The core library calls functions (`at_*`) that the shim must define and export. An unsuitable shim is deleted."""

    def compiled(source: str, name: str, *flags: str) -> Path:
        file, library = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
        file.write_text(source)
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, file, *flags], check=True)
        return library

    # needed_from_shim skips versioned symbols (malloc is glibc's) and weak ones (optional)
    calls = "void *at_there(void), *at_here(void), *malloc(unsigned long), *optional(void) __attribute__((weak));"
    core = compiled(f"{calls} void *core(void) {{ return at_there() ? at_here() : optional ? optional() : malloc(1); }}", "core")
    needed = needed_from_shim(core)
    assert needed == {"at_here", "at_there"}
    here, there = "void *at_here(void) { return 0; }", "void *at_there(void) { return 0; } void inner(void) {}"
    script = tmp_path / "exports.map"
    script.write_text(build_shims.version_script(needed))
    flag = f"-Wl,--version-script={script}"
    for source in (here, f'{here} __attribute__((visibility("hidden"))) {there}'):
        shim = compiled(source, "shim", flag)
        with pytest.raises(SystemExit, match="does not define: at_there$"):
            check_exports(shim, needed)
        assert not shim.exists()
    shim = compiled(f"{here} {there}", "shim", flag)
    check_exports(shim, needed)
    assert symbols(shim, "TW") == needed
    with pytest.raises(SystemExit, match="expected the core library"):
        needed_from_shim(shim)
