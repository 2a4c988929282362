"""Summaries of runs by hand; a page that needs nothing else and escapes everything; folders of all kinds."""

import csv
import json
import re

import pytest

from vitplast_jax import command, report
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json, write_text
from vitplast_jax.reports import collect, overview, page
from vitplast_jax.training import config as settings

COMPONENTS = ("mha", "fc1", "ln1")


def write_run(place, validation, test, norm=1.0, data="digits", config=None):
    """What a finished run leaves, without having run it."""
    split = {"balanced_accuracy": 0.5, "loss": 1.0, "count": 100}
    results = {
        "test": {"accuracy": test, **split},
        "validation": {"accuracy": validation, **split},
        "best_step": 3,
        "trainable": ["mha", "head"],
        "parameters": {"total": 100, "trainable": 30, "method": 20, "head": 10},
        "protocol": {"data": data, "selection": "best validation accuracy, tested once"},
        "seconds": 2.0,
    }
    lines = [{"step": s, "loss": 1.0, "grad_norm/mha": norm, "grad_norm/head": 9.0} for s in (1, 2)]
    write_json(place / "results.json", results)
    write_text(place / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    described = json.loads(settings.to_json(settings.validate(config or {"data.name": data})))
    described |= {"format": 1, "spec": {"name": "tiny"}, "class_names": ["a"], "base_weights": {}}
    write_json(place / "config.json", described)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """3 components x 2 rates x 2 seeds on one task; validation and test disagree on the rate, one run has failed."""
    root, cells = tmp_path_factory.mktemp("runs") / "<sweep>", []
    for rank, name in enumerate(COMPONENTS):
        for rate in (0.1, 0.2):
            for seed in (0, 1):
                cell = {"cell": f"{name}-{rate}-{seed}", "trainable": name, "learning_rate": rate, "seed": seed}
                failed = (name, rate, seed) == ("fc1", 0.1, 1)
                cells.append(cell | {"state": "failed" if failed else "finished", "error": "x < y" if failed else None})
                if not failed:
                    better = 0.1 if rate == 0.1 else 0.0
                    test = 0.9 - 0.1 * rank + 0.02 * seed - better
                    write_run(root / "cells" / cell["cell"], 0.5 + better, round(test, 6), norm=3.0 - rank)
    write_json(root / "sweep.json", {"axes": ["trainable", "learning_rate", "seed"], "cells": cells})
    means = {"mha": 2.0, "fc1": 3.0, "ln1": 1.0, "ln2": 0.5}
    result = {"components": [{"component": name, "mean": mean} for name, mean in means.items()]}
    write_json(root / "plasticity" / "start" / "plasticity.json", result)
    return root


def test_the_learning_rate_is_chosen_on_validation(folder):
    summary = collect.summarise(folder)
    by_config = {group["config"]: group for group in summary["groups"]}
    assert [by_config[name]["learning_rate"] for name in COMPONENTS] == [0.1, 0.2, 0.1]  # at 0.1 a seed of fc1 failed
    mha = by_config["mha"]
    assert mha["accuracy"] == pytest.approx(0.81) and mha["std"] == pytest.approx(0.02 / 2**0.5)
    assert (mha["seeds"], mha["validation"], mha["grad_norm"], mha["plasticity"]) == (2, 0.6, 3.0, 2.0)
    assert mha["edge"] and mha["parameters"] == 20 and mha["paper"] is None
    assert summary["notes"] == ["fc1-0.1-1 failed: x < y"]


def test_tests_are_paired_by_seed_and_agreement_is_over_components(folder):
    summary = collect.summarise(folder)
    assert [(row["against"], row["config"], row["pairs"]) for row in summary["tests"]] == [
        ("mha", "fc1", 2),
        ("mha", "ln1", 2),
    ]
    assert summary["tests"][1]["difference"] == pytest.approx(0.2)
    agreement = {(row["of"], row["with"]): row for row in summary["agreement"]}
    # accuracy: mha 0.81, fc1 (at rate 0.2) 0.81 as well, ln1 0.61; plasticity 2, 3, 1; norms 3, 2, 1
    assert agreement["plasticity", "accuracy"]["spearman"] == pytest.approx(0.866, abs=1e-3)
    assert agreement["plasticity", "grad_norm"]["spearman"] == pytest.approx(0.5)
    assert agreement["plasticity", "accuracy"]["items"] == 3


def test_the_files_agree(folder):
    summary = collect.summarise(folder)
    assert collect.save(summary, folder)[-1] == "sweep.png"
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == [group["accuracy"] for group in summary["groups"]]
    assert len(list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))) == 12
    assert json.loads((folder / "summary.json").read_text()) == summary
    markdown = (folder / "table.md").read_text()
    assert "| mha | 0.8100 |" in markdown and "Holm" in markdown and "* fc1-0.1-1 failed" in markdown
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_needs_nothing_else_and_escapes_everything(folder):
    overview.write_report(folder)
    text = (folder / "report.html").read_text()
    assert "<h1>Sweep &lt;sweep&gt;</h1>" in text and "x &lt; y" in text and "<sweep>" not in text
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "://" not in text and "<script" not in text and "@import" not in text
    assert text.count("<table>") == text.count("</table>") >= 4


def test_parts_of_a_page(tmp_path):
    (tmp_path / "a.png").write_bytes(b"PNG")
    assert page.picture(tmp_path / "a.png", 'a "b"') == (
        '<p><img alt="a &quot;b&quot;" src="data:image/png;base64,UE5H"></p>'
    )
    assert page.paragraph("a & b") == "<p>a &amp; b</p>"
    table = page.table([{"a_b": 1234, "<c>": "<d>"}, {"a_b": None}])
    assert "<th>a b</th><th>&lt;c&gt;</th>" in table and '<td class="number">1,234</td><td>&lt;d&gt;</td>' in table
    assert "<h2>" not in page.page("t", [("empty", [])])


def test_a_folder_of_runs_needs_no_sweep(tmp_path):
    for name, trainable, accuracy in (("one", "mha", 0.9), ("two", "ln1,ln2", 0.7)):
        write_run(tmp_path / name, 0.8, accuracy, config={"trainable": trainable, "data.name": "digits"})
    axes, rows = collect.read_runs(tmp_path)
    assert axes == ["trainable"] and [row["trainable"] for row in rows] == ["mha", "ln1+ln2"]
    groups = collect.summarise(tmp_path)["groups"]
    assert [(group["config"], group["accuracy"], group["std"]) for group in groups] == [
        ("mha", 0.9, None),
        ("ln1+ln2", 0.7, None),
    ]


def call(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        command.run(report.main, report.__doc__, report.FLAGS, list(map(str, argv)))
    printed = capsys.readouterr()
    return caught.value.code, printed.out, printed.err


def test_a_run_stands_beside_the_paper(tmp_path, capsys):
    write_run(tmp_path, 0.97, 0.98, data="cifar10")
    assert call(capsys, "--workdir", tmp_path)[0] == 0
    rows = list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines()))
    assert [(row["split"], row["accuracy"], row["paper"]) for row in rows] == [
        ("test", "0.98", "0.9891"),
        ("validation", "0.97", ""),
    ]
    text = (tmp_path / "report.html").read_text()
    assert "arXiv 2602.06883" in text and "0.9891" in text and "learning_rate" in text


def test_bad_folders_are_one_line(tmp_path, capsys):
    status, _, err = call(capsys, "--workdir", tmp_path / "nowhere")
    assert status == 1 and "holds neither a run" in err and err.count("\n") == 1
    (tmp_path / "sweep.json").write_text("[]")
    assert "sweep.json is damaged" in call(capsys, "--workdir", tmp_path)[2]
    write_run(tmp_path / "unfinished", 0.5, 0.5)
    (tmp_path / "unfinished" / "results.json").unlink()
    with pytest.raises(UserError, match="has not ended"):
        overview.write_report(tmp_path / "unfinished")
