"""What do all commands share? Flags, `--config` with its overrides, `--help`, and errors that take one line.

In: a command's docstring (its help), its flags and its `main(flags)`; the command line.
Out: the process ends with status 0, 1 (an error; one line on stderr), 2 (wrong usage), 130 (interrupted) or 143 (a run
that SIGTERM stopped after it had saved its state: the same command continues it).

`--config FILE:ARG` calls the file's `get_config(ARG)` (ml_collections); `--config.KEY=VALUE` overrides one key. The
overrides are read by the rules of training/config.py rather than by ml_collections' flags, which refuse `steps=1e3`,
take True for a number and make one text of `mha,fc1`. Nothing here imports jax, so `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags as absl_flags

from vitplast_jax.errors import Stopped, UserError
from vitplast_jax.training import config as settings

if TYPE_CHECKING:  # the speed suites run where ml_collections is not installed
    from ml_collections import ConfigDict


class UsageError(UserError):
    """The command line itself is wrong: exit status 2."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: `default` also gives its type (text, whole number, switch)."""

    name: str
    meaning: str
    default: str | int | bool = ""
    value: str = ""  # what the help shows for the value
    required: bool = False


CONFIG = Flag("config", "config file; :ARG is passed to its get_config", value="configs/X.py[:ARG]", required=True)
WORKDIR = Flag("workdir", "folder of the run", value="DIR", required=True)
# One command on several hosts; TPU hosts of one pod find each other without.
PROCESSES = (
    Flag("coordinator", "where process 0 of several listens; its next port is used too", value="HOST:PORT"),
    Flag("processes", "how many processes make up the run", default=0, value="N"),
    Flag("process", "which of them this one is, from 0", default=-1, value="I"),
)
DEBUG = Flag("debug", "show where an error happened", default=False)


def _define(flag: Flag, values: absl_flags.FlagValues) -> None:
    if isinstance(flag.default, bool):
        absl_flags.DEFINE_boolean(flag.name, flag.default, flag.meaning, flag_values=values)
    elif isinstance(flag.default, int):
        absl_flags.DEFINE_integer(flag.name, flag.default, flag.meaning, flag_values=values)
    else:
        absl_flags.DEFINE_string(flag.name, flag.default, flag.meaning, flag_values=values)


def help_text(doc: str, flags: Sequence[Flag]) -> str:
    """What `--help` prints: the docstring, every flag and, for commands with a config, every key of it."""
    lines = [doc.strip(), "", "Flags:"]
    for flag in flags:
        shown = f"--{flag.name}" + (f" {flag.value}" if flag.value else "")
        default = "" if flag.default in ("", False) else f" (default {flag.default})"
        note = " (required)" if flag.required else default
        lines.append(f"  {shown:<32} {flag.meaning}{note}")
    lines.append(f"  {'--help':<32} this text")
    if any(flag.name == CONFIG.name for flag in flags):
        lines += ["", "Config keys (--config.KEY=VALUE), their defaults, what they may hold:"]
        for key, field in settings.FIELDS.items():
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            default = ",".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
            lines.append(f"  {key + '=' + default:<40} {'; '.join(filter(None, (field.meaning, field.allowed)))}")
    return "\n".join(lines)


def load_config(path_and_argument: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """The validated config of `FILE` or `FILE:ARG`, with (key, text) overrides applied in their order."""
    from ml_collections import ConfigDict

    path, colon, argument = path_and_argument.partition(":")
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"config file {path} cannot be read ({reason})") from None
    module = types.ModuleType("config_file")
    module.__file__ = path
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # a config file is a program of the user's own
        if not callable(getattr(module, "get_config", None)):
            raise UserError(f"config file {path} defines no get_config()")
        config = module.get_config(*([argument] if colon else []))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == path:
            place = f":{error.lineno}"
        else:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            place = f":{lines[-1]}" if lines else ""
        raise UserError(f"config file {path}{place}: {_line(error)}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"config file {path}: get_config() returned {type(config).__name__}, not a ConfigDict")
    values = config.to_dict()
    named = {key for key, _ in overrides}
    if "peft.method" in named and "trainable" not in named and not argument:
        # What a file trains without an adapter is not asked for beside one: the adapter alone.
        values["trainable"] = settings.FIELDS["trainable"].default
    for key, value in overrides:
        try:
            value = settings.read(key, value)
        except UserError as error:
            raise UsageError(f"--{error}") from None
        *groups, name = key.split(".")
        node = values
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return settings.validate(values)


def _take_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Splits `--config.KEY=VALUE`, `--config.KEY VALUE` and, for switches, `--config.KEY` from the other arguments."""
    rest, overrides, queue = [], [], list(argv)
    while queue:
        argument = queue.pop(0)
        key, equals, value = argument.lstrip("-").partition("=")
        if not (argument.startswith("-") and key.startswith("config.")):
            rest.append(argument)
            continue
        key = key.removeprefix("config.")
        if not equals:
            if key in settings.FIELDS and isinstance(settings.FIELDS[key].default, bool):
                value = "true"
            elif key not in settings.FIELDS:
                raise UsageError(f"--{settings.unknown_key(key)}")
            elif not queue:
                raise UsageError(f"--config.{key} needs a value: --config.{key}=VALUE")
            else:
                value = queue.pop(0)
        overrides.append((key, value))
    return rest, overrides


def parse(argv: Sequence[str], flags: Sequence[Flag]) -> types.SimpleNamespace:
    """The flags' values by name; `config` is loaded, overridden and validated. `argv` is without the program's name."""
    rest, overrides = _take_overrides(argv)
    values = absl_flags.FlagValues()
    for flag in flags:
        _define(flag, values)
    try:
        left = values(["command", *rest])[1:]
    except absl_flags.Error as error:
        raise UsageError(f"{_line(error)} (--help lists the flags)") from None
    if left:
        raise UsageError(f"{left[0]!r} belongs to no flag (--help lists the flags)")
    missing = [f"--{flag.name}" for flag in flags if flag.required and values[flag.name].value == flag.default]
    if missing:
        raise UsageError(f"{', '.join(missing)} must be given (--help shows an example)")
    result = types.SimpleNamespace(**{flag.name: values[flag.name].value for flag in flags})
    if getattr(result, "config", ""):
        result.config = load_config(result.config, overrides)
    elif overrides and not getattr(result, "run", ""):
        raise UsageError(f"--config.{overrides[0][0]} changes nothing here: it needs --config FILE")
    result.overrides = tuple(overrides)
    return result


def _line(error: BaseException) -> str:
    """An exception as one line of bearable length."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, KeyError) and error.args:
        words = str(error.args[0])  # str(error) would be the repr of the key
    else:
        words = error.msg if isinstance(error, SyntaxError) else str(error)
    words = " ".join(words.split())
    words = words if len(words) <= 600 else words[:600] + " ..."
    name = type(error).__name__
    return words if isinstance(error, (UserError, absl_flags.Error)) else f"{name}: {words}" if words else name


def _with_huge_pages() -> None:
    """Starts this process once more with glibc's huge pages (same PID), for they must be asked for before the start.

    XLA on the CPU takes and frees its buffers in every step; with 2 MiB pages a ViT-pico step took 0.30 s instead of
    0.39 s (70,000 page faults instead of 2.8 million). Nothing changes where the kernel has no such pages, where
    GLIBC_TUNABLES already chooses, or with VITPLAST_NO_REEXEC=1.
    """
    if sys.platform != "linux" or not sys.executable or os.environ.get("VITPLAST_NO_REEXEC"):
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            unavailable = "[never]" in file.read()
    except OSError:
        unavailable = True
    if unavailable or "glibc.malloc.hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))
    os.environ["VITPLAST_NO_REEXEC"] = "1"  # once, whatever happens
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _interrupt(*_):
    raise KeyboardInterrupt


def run(
    main: Callable[[types.SimpleNamespace], None], doc: str, flags: Sequence[Flag], argv: Sequence[str] | None = None
):
    """A command from its first argument to its exit status; never returns."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = (*flags, DEBUG)
    debug = any(argument.lstrip("-") in ("debug", "debug=true") for argument in arguments)
    try:
        if {"--help", "-help", "-h", "--helpfull"} & set(arguments):
            print(help_text(doc, flags), flush=True)
            sys.exit(0)
        if argv is None:
            _with_huge_pages()
        values = parse(arguments, flags)
        # SIGTERM ends a command as Ctrl-C does: what is being written in the background is finished first.
        signal.signal(signal.SIGTERM, _interrupt)
        absl_flags.FLAGS.mark_as_parsed()  # Grain reads its own flags and insists that somebody has parsed them
        main(values)
    except BrokenPipeError:  # the reader, as in `| head`, has seen enough; Python must not flush once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        print("stopped; train continues with the same command", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        line = _line(error)
        if not isinstance(error, UserError) and not debug:
            line += " (--debug shows where)"
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    sys.exit(0)
