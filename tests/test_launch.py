"""``gpuwatch run``: the program is what python would have made of it. None of these programs has torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwatch.cli import main
from gpuwatch.launch import command_of, interpreter_options

ROOT = Path(__file__).resolve().parent.parent


def python(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a directory of its own."""
    path = os.pathsep.join(part for part in (environment.pop("PYTHONPATH", ""), f"{ROOT}:{ROOT / 'hooks'}") if part)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def same(place: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> str:
    """Run it by python and by ``gpuwatch run``: nothing may differ. Returns what it printed."""
    plain = python(place, *options, *arguments, **environment)
    watched = python(place, *options, "-m", "gpuwatch", "run", *arguments, **environment)
    assert (watched.returncode, watched.stdout, watched.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return plain.stdout + plain.stderr


def test_a_script_sees_the_arguments_and_the_names_that_python_gives_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import sys, beside\n"
        "print(sys.argv, __name__, __file__, __spec__, sys.path[0], sys.modules['__main__'].__dict__ is globals())\n"
        "print([place for place in sys.path if 'startup' in place], {'torch', 'gpuwatch'} & set(sys.modules))\n"
        "sys.exit(3)\n"
    )
    said = same(tmp_path, "script.py", "--steps", "3", "--", "-m", "--version")
    assert said.startswith("['script.py', '--steps', '3', '--', '-m', '--version'] __main__")
    assert said.endswith("[] set()\n")


def test_a_module_runs_as_with_minus_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv[1:], __spec__.name)")
    assert same(tmp_path, "-m", "package", "-x") == "['-x'] package.__main__\n"


def test_a_traceback_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def fall():\n    raise ValueError('here')\nfall()\n")
    assert same(tmp_path, "script.py").endswith("ValueError: here\n")


def test_options_of_the_interpreter_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, warnings\nprint(sys.flags.optimize, sys.stdout.write_through)\nwarnings.warn('seen')\n"
    )
    said = same(tmp_path, "script.py", options=("-u", "-O", "-W", "error"))
    assert said.startswith("1 True\n") and said.endswith("UserWarning: seen\n")


def test_a_signal_ends_it_as_it_ends_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert python(tmp_path, "-m", "gpuwatch", "run", "script.py").returncode == -signal.SIGTERM


def test_a_launcher_is_started_by_its_name_and_its_children_are_prepared(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "launcher"
    launcher.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; print(len(sys.meta_path), sys.argv)' \"$@\"\n"
    )
    launcher.chmod(0o755)
    path = f"{launcher.parent}:{os.environ['PATH']}"
    plain = python(tmp_path, "-c", "import sys; print(len(sys.meta_path))")
    done = python(tmp_path, "-m", "gpuwatch", "run", "launcher", "--two", PATH=path)
    assert done.stdout == f"{int(plain.stdout) + 1} ['-c', '--two']\n"
    assert command_of(["sh", "train.sh"])[1:] == ["train.sh"]


def test_the_programs_own_sitecustomize_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.customized = __file__")
    (tmp_path / "script.py").write_text("import sys, sitecustomize; print(sys.customized, sitecustomize.__file__)")
    assert same(tmp_path, "script.py", PYTHONPATH=str(tmp_path / "site")).count("site/sitecustomize.py") == 2


@pytest.mark.parametrize(
    "torch",
    [
        pytest.param("raise RuntimeError('no driver')", id="that fails"),
        pytest.param("import torch.missing", id="that lacks a part"),
        pytest.param("__version__ = '0'", id="that is another's"),
    ],
)
def test_a_torch_that_does_not_work_fails_as_it_did(tmp_path: Path, torch: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    (tmp_path / "script.py").write_text("import torch\nprint(type(torch.__spec__), torch.__spec__.origin)\n")
    plain = python(tmp_path, "script.py")
    watched = python(tmp_path, "-m", "gpuwatch", "run", "script.py")
    told = [line for line in watched.stderr.splitlines(True) if not line.startswith("gpuwatch: not watched: ")]
    assert (watched.returncode, watched.stdout, "".join(told)) == (plain.returncode, plain.stdout, plain.stderr)
    assert (len(told) == len(watched.stderr.splitlines())) is bool(plain.returncode)


def test_looking_for_torch_does_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import importlib.util, sys\n"
        "for _ in range(2): importlib.util.find_spec('torch')\n"
        "print('torch' in sys.modules)\n"
    )
    assert same(tmp_path, "script.py") == "False\n"


def test_where_gpuwatch_is_switched_off_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['PYTHONPATH'], len(sys.meta_path))")
    same(tmp_path, "script.py", GPUWATCH_DISABLE="1")


def test_python_without_pythonpath_runs_the_program_and_says_that_it_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('done')")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'hooks')!r}]; sys.argv[1:] = ['run', 'script.py']; "
    done = python(
        tmp_path, "-I", "-c", code + "sys.orig_argv = [sys.executable, '-I']; import gpuwatch.__main__ as m; m.main()"
    )
    assert done.stdout == "done\n" and "so the run is not watched" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected SCRIPT or -m MODULE"),
        (["--"], "expected SCRIPT or -m MODULE"),
        (["-m"], "-m expects the name of a module"),
        (["-c", "1"], "expected SCRIPT or -m MODULE, got '-c'"),
        (["nonesuch.py"], "no file 'nonesuch.py', and no command of this name"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["run", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert "gpuwatch run -m MODULE" in capsys.readouterr().out


def test_options_are_those_before_the_module_or_the_script() -> None:
    assert interpreter_options(["python", "-u", "-X", "dev", "-m", "gpuwatch", "run", "-x"]) == ["-u", "-X", "dev"]
    assert interpreter_options(["python", "-Werror", "/bin/gpuwatch", "run", "-x"]) == ["-Werror"]
    assert interpreter_options(["python", "-u", "-c", "main()", "run"]) == ["-u"]
    assert interpreter_options(["/bin/gpuwatch"]) == []
