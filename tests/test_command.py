"""Commands: the exit status, the one line on stderr, and which value an override ends up with."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vitplast_jax import command
from vitplast_jax.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKSTART = str(REPOSITORY / "configs/quickstart.py")
FLAGS = (
    command.CONFIG,
    command.WORKDIR,
    command.Flag("overwrite", "start anew", default=False),
    command.Flag("count", "how many", default=3, value="N"),
)
DOC = "Does a thing.\n\nExample:\n  python -m thing --workdir DIR"


@pytest.fixture
def call(capsys):
    """`call(text, main)` runs a command line; returns (status, values that main saw, stdout, stderr)."""

    def run(arguments, main=None, flags=FLAGS):
        seen = []
        arguments = shlex.split(arguments) if isinstance(arguments, str) else arguments
        with pytest.raises(SystemExit) as exit:
            command.run(main or seen.append, DOC, flags, arguments)
        return exit.value.code, seen[0] if seen else None, *capsys.readouterr()

    return run


def test_flags_reach_main(call):
    status, values, _, err = call(f"--config {QUICKSTART} --workdir=runs/x --overwrite --count=5")
    assert (status, err) == (0, "")
    assert (values.workdir, values.overwrite, values.count, values.debug) == ("runs/x", True, 5, False)
    assert values.config.trainable == ("mha",) and values.config.is_locked


@pytest.mark.parametrize(
    ("argument", "override", "key", "value"),
    [
        ("", "--config.steps=1e3", "steps", 1000),
        ("", "--config.steps 800", "steps", 800),
        ("", "-config.steps=800", "steps", 800),
        ("", "--config.steps=500 --config.steps=600", "steps", 600),
        ("", "--config.image_size=224", "image_size", (224, 224)),
        ("", "--config.image_size=224,160", "image_size", (224, 160)),
        ("", "--config.trainable=mha,fc1@0-5", "trainable", ("mha", "fc1@0-5")),
        ("", "--config.trainable=\"('mha', 'fc1')\"", "trainable", ("mha", "fc1")),
        ("", "--config.also_trainable=", "also_trainable", ()),
        ("", "--config.learning_rate_factors=head=10", "learning_rate_factors", ("head=10",)),
        ("", "--config.data.flip", "data.flip", True),
        ("", "--config.data.flip=true", "data.flip", True),
        ("", "--config.data.crop_scale=0.5,1", "data.crop_scale", (0.5, 1.0)),
        ("", "--config.data.path='a b=c'", "data.path", "a b=c"),
        ("", "--config.mesh.data -1", "mesh.data", -1),
        ("", "--config.learning_rate=1", "learning_rate", 1.0),
        (":fc1", "", "trainable", ("fc1",)),
        (":ln1+ln2@0-2", "", "trainable", ("ln1", "ln2@0-2")),
        (":fc1", "--config.trainable=head", "trainable", ("head",)),
    ],
)
def test_overrides(call, argument, override, key, value):
    status, values, _, err = call(f"--config {QUICKSTART}{argument} --workdir x {override}")
    assert (status, err) == (0, "")
    result = values.config
    for part in key.split("."):
        result = result[part]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("", 2, "--config, --workdir must be given"),
        (f"--config {QUICKSTART}", 2, "--workdir must be given"),
        (f"--config {QUICKSTART} --workdir", 2, "workdir"),
        (f"--config {QUICKSTART} --workdir=", 2, "--workdir must be given"),
        (f"--config {QUICKSTART} --workdr x", 2, "Did you mean: workdir"),
        (f"--config {QUICKSTART} --workdir x --count=some", 2, "count"),
        (f"--config {QUICKSTART} --workdir x stray", 2, "'stray' belongs to no flag"),
        (
            f"--config {QUICKSTART} --workdir x --config.stps=3",
            2,
            "--config.stps does not exist; did you mean config.steps?",
        ),
        (f"--config {QUICKSTART} --workdir x --config.stps 3", 2, "did you mean config.steps?"),
        (f"--config {QUICKSTART} --workdir x --config.data.nmae=x", 2, "did you mean config.data.name?"),
        (f"--config {QUICKSTART} --workdir x --config.data=x", 2, "--config.data is a group of data.name"),
        (
            f"--config {QUICKSTART} --workdir x --config.steps=1.5",
            2,
            "--config.steps is '1.5'; allowed: a whole number",
        ),
        (f"--config {QUICKSTART} --workdir x --config.steps=", 2, "--config.steps is ''"),
        (f"--config {QUICKSTART} --workdir x --config.steps", 2, "--config.steps needs a value"),
        (f"--config {QUICKSTART} --workdir x --config.=3", 2, "does not exist"),
        (f"--config {QUICKSTART} --workdir x --config.accumulation=3", 1, "does not divide"),
        (f"--config {QUICKSTART}:m'' --workdir x --config.trainable=", 2, "--config.trainable is ''"),
        (f"--config {QUICKSTART}:mha@ --workdir x", 1, "config.trainable is ('mha@',)"),
        ("--config nowhere/c.py --workdir x", 1, "config file nowhere/c.py cannot be read (No such file or directory)"),
        (f"--config {REPOSITORY} --workdir x", 1, "cannot be read (Is a directory)"),
    ],
)
def test_errors_take_one_line(call, line, status, message):
    result, values, out, err = call(line)
    assert (result, values, out) == (status, None, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "argument", "message"),
    [
        ("def get_config(:\n  pass", "", "c.py:1: SyntaxError: invalid syntax"),
        ("x = 1", "", "c.py defines no get_config()"),
        ("get_config = 3", "", "c.py defines no get_config()"),
        ("def get_config(): return {}[3]", "", "c.py:1: KeyError: 3"),
        ("import nothing_of_that_name", "", "c.py:1: ModuleNotFoundError"),
        ("def get_config(): pass", "", "get_config() returned NoneType, not a ConfigDict"),
        ("def get_config(): return 3", ":a", "takes 0 positional arguments but 1 was given"),
        ("def get_config(a): return 3", "", "missing 1 required positional argument"),
        ("D\nconfig.data.nmae = 'x'", "", 'c.py:5: AttributeError: \'Key "nmae" does not exist'),
        ("D\nconfig.steps = 1.5", "", "c.py:5: TypeError"),
        ("D\nconfig.steps = -1", "", "config.steps is -1; allowed: a whole number from 1"),
        ("\0", "", "c.py"),
    ],
)
def test_config_files_that_are_wrong(call, tmp_path, content, argument, message):
    if content.startswith("D\n"):
        body = content[2:]
        content = (
            "from vitplast_jax.training.config import default_config\n\n"
            f"def get_config():\n    config = default_config()\n    {body}\n    return config\n"
        )
    (tmp_path / "c.py").write_text(content)
    status, _, out, err = call(f"--config {tmp_path / 'c.py'}{argument} --workdir x")
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_config_files_that_are_not_text(call, tmp_path):
    (tmp_path / "c.py").write_bytes(b"\xff\xfe\x00")
    status, _, _, err = call(f"--config {tmp_path / 'c.py'} --workdir x")
    assert status == 1 and "cannot be read" in err and err.count("\n") == 1


def test_overrides_need_a_config(call):
    flags = (command.WORKDIR,)
    status, _, _, err = call("--workdir x --config.steps=3", flags=flags)
    assert status == 2 and "--config.steps changes nothing here" in err


def raiser(error):
    def main(flags):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("data.path is missing"), 1, "error: data.path is missing\n"),
        (UserError("two\nlines"), 1, "error: two lines\n"),
        (command.UsageError("give --config or --run"), 2, "error: give --config or --run\n"),
        (ValueError("a\n  b"), 1, "error: ValueError: a b (--debug shows where)\n"),
        (KeyError("blocks"), 1, "error: KeyError: blocks (--debug shows where)\n"),
        (MemoryError(), 1, "error: MemoryError (--debug shows where)\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "stopped; train continues with the same command\n"),
    ],
)
def test_what_main_raises(call, error, status, line):
    result = call(f"--config {QUICKSTART} --workdir x", raiser(error))
    assert (result[0], result[3]) == (status, line)


def test_debug_shows_the_traceback(call):
    status, _, _, err = call(f"--config {QUICKSTART} --workdir x --debug", raiser(ValueError("why")))
    assert status == 1 and "Traceback" in err and err.endswith("error: ValueError: why\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_purpose_example_flags_and_keys(call, flag):
    status, values, out, err = call(f"--workdir x {flag}")
    assert (status, values, err) == (0, None, "")
    assert out.startswith("Does a thing.") and "python -m thing" in out
    for text in ("--config configs/X.py[:ARG]", "--workdir DIR", "--overwrite", "--count N", "(default 3)", "--debug"):
        assert text in out
    assert "  learning_rate=0.01 " in out and "  data.crop_scale=0.08,1 " in out
    assert max(len(line) for line in out.splitlines()) < 160


REEXEC = """
import os, sys
from vitplast_jax import command
def main(flags):
    print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.flags.dev_mode, flags.workdir)
command.run(main, "Doc", (command.WORKDIR,))
"""


def start(env):
    env = {**{k: v for k, v in os.environ.items() if k not in ("VITPLAST_NO_REEXEC", "GLIBC_TUNABLES")}, **env}
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", REEXEC, "--workdir", "a b'c"],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=REPOSITORY,
    )
    pid, tunables, dev_mode, workdir = process.communicate(timeout=60)[0].strip().split(" ", 3)
    # the same process, interpreter options and arguments, whether it started itself anew or not
    assert process.returncode == 0 and (int(pid), dev_mode, workdir) == (process.pid, "True", "a b'c")
    return tunables


def huge_pages_on_request() -> bool:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return file.exists() and "[never]" not in file.read_text()


@pytest.mark.skipif(not huge_pages_on_request(), reason="this kernel offers no transparent huge pages")
def test_commands_ask_for_huge_pages_once():
    assert start({}) == "glibc.malloc.hugetlb=1"
    assert start({"GLIBC_TUNABLES": "glibc.malloc.check=0"}) == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    assert start({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == "glibc.malloc.hugetlb=0"
    assert start({"VITPLAST_NO_REEXEC": "1"}) == "None"
