"""README: its commands parse, the files it names are there, its Python runs. `.ci/run` runs the two main commands."""

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from vitplast_jax import command

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines():
    """Every command of README's bash blocks and of the configs' headers."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    for path in sorted((REPOSITORY / "configs").glob("*.py")):
        header = path.read_text().split('"""')[1].replace("\n      --", " --")
        lines += [line.strip() for line in header.splitlines() if line.startswith("  python ")]
    return [part.strip() for line in lines for part in line.split("&&")]


COMMANDS = [line for line in command_lines() if " -m vitplast_jax." in line]


def test_readme_has_its_commands():
    assert len(blocks("bash")) >= 5 and len(COMMANDS) >= 10
    for marker in ("quickstart", "tests"):
        assert README.count(f"<!-- ci:{marker} -->\n```bash\npython3 -m venv .venv && ") == 1


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    line = re.sub(r"\[(--config.*?)( or [^\]]*)?\]", r"\1", line)  # [--config.weights=FILE or hf-hub:ID]
    line = re.sub(r"\s{3,}\(.*\)$", "", line)  # a remark behind it
    _, _, module, *arguments = shlex.split(line)
    module = importlib.import_module(module)
    values = command.parse(arguments, (*module.FLAGS, command.DEBUG))
    assert values.workdir


@pytest.mark.parametrize("line", [line for line in command_lines() if " -m vitplast_jax." not in line])
def test_other_commands_are_known_and_name_what_exists(line):
    words = shlex.split(line)
    if words[:3] == ["python3", "-m", "venv"] or words[1:3] == ["-m", "pytest"]:
        return
    if words[0] == "python" and words[1].startswith("tools/"):
        tool = runpy.run_path(str(REPOSITORY / words[1]))
        flags, arguments = (
            (tool["COMMANDS"][words[2]][1], words[3:]) if "COMMANDS" in tool else (tool["FLAGS"], words[2:])
        )
        command.parse(tool["named"](arguments) if "named" in tool else arguments, flags)
        return
    assert words[0].split("/")[-1] == "pip" and words[1:4] == ["install", "-c", "requirements.txt"], line
    assert words[4] == "-e" and len(words) == 6
    extra = re.fullmatch(r"\.(\[(\w+)\])?", words[5])[2]
    assert extra is None or f'"{extra}": [' in (REPOSITORY / "setup.py").read_text()


def test_files_that_readme_names_exist():
    for name in re.findall(r"`((?:configs|vitplast_jax|tools|\.ci)/[\w./]+)(?::\w+)?`", README):
        assert (REPOSITORY / name).exists(), name


def test_python_runs(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})


def test_no_placeholders_are_left():
    assert "TODO" not in README
    for path in (REPOSITORY / "configs").glob("*.py"):
        assert "TODO" not in path.read_text(), path.name
