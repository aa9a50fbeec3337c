"""`checkmate cost`: its values, its faults, its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import yaml
from PIL import Image
from typer.testing import CliRunner

from checkmate.cli.main import app
from checkmate.planner.cost.inputs import DEFAULTS, CostInputs, ModelInputs
from checkmate.planner.cost.reading import read_inputs

DOC = Path(__file__).parents[2] / "docs" / "planning.md"


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cost", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def data(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, ["cost", *map(str, arguments), "--json"])
    return json.loads(result.stdout)


def test_by_default_it_is_the_papers_llama3() -> None:
    report = data("--runs", "0")
    best, checkmate = report["schemes"]
    assert round(checkmate["wasted_gpu_hours"]) == 4367
    assert best["every_iterations"] == 36
    assert report["extra_ports"] == 256
    assert round(checkmate["node_hours"]) == 165_888
    assert best["simulated"] is None


@pytest.mark.parametrize(
    ("arguments", "beyond"),
    [
        ([], []),
        (["--failure-rate", "1"], ["conventional, best", "Checkmate"]),
        (["--stall", "30d"], ["conventional, best"]),
        (["--every", "1d"], ["conventional, yours"]),
    ],
)
def test_a_closed_form_that_does_not_hold_is_said_to(arguments: list[str], beyond: list[str]) -> None:
    for more in ((), ("--json",)):
        result = CliRunner().invoke(app, ["cost", *arguments, "--runs", "0", *more])
        assert result.exit_code == 0
        warning_text = " ".join(result.stderr.split())
        assert warning_text.count("its figures, savings included, are wrong here") == len(beyond)
        for name in beyond:
            assert f"are expected from one checkpoint to the next ({name})" in warning_text


def test_leaving_the_simulation_out_is_advised_where_the_closed_form_holds() -> None:
    for beyond in (["--failure-rate", "1"], ["--stall", "30d"], ["--every", "30d"]):
        code, output = invoke(*beyond)
        assert (code, "would make no progress" in output, "--runs 0" in output) == (2, True, False)
    code, output = invoke("--runs", "1000000", "--failure-rate", "1e-3")
    assert (code, "skip it with --runs 0" in output) == (2, True)


def test_the_table_has_both_and_yours_with_the_spread() -> None:
    code, output = invoke("--every", "30min", "--runs", "200")
    assert code == 0
    assert "yours" in output
    assert "393 (30 min)" in output
    assert "1,730,323" in output
    assert "in 200 simulated runs" in output
    assert "256 switch ports and as many NICs, with transceivers" in output
    assert "more than 6.86 ms" in output


def test_the_simulation_is_beside_the_closed_form_and_seeded() -> None:
    first, again, different = (
        data("--runs", "300", "--seed", seed)["schemes"][0] for seed in ("1", "1", "2")
    )
    assert first == again != different
    assert first["simulated"]["wasted_gpu_hours_mean"] == pytest.approx(first["wasted_gpu_hours"], rel=0.03)
    spread = first["simulated"]["wasted_gpu_hours"]
    assert spread["p5"] < spread["p50"] < spread["p95"]


def test_what_nobody_gave_is_marked_as_assumed(tmp_path: Path) -> None:
    file = tmp_path / "cost.yaml"
    file.write_text("gpus: 1024\nprice: 11.06\nrestart: 10min\n")
    line: list[str | Path] = [file, "--duration", "20d", "--parameters", "8B", "--storage", "1GB/s"]
    code, output = invoke(*line, "--runs", "10")
    assert code == 0
    marks = re.findall(r"(?<=[─nd] )([a-z-]+) [^─]*?(given|assumed)(?= )", output)
    given_keys = ["gpus", "duration", "stall", "price", "restart"]
    assert [key for key, mark in marks if mark == "given"] == given_keys
    assumed = [key.replace("-", "_") for key, mark in marks if mark == "assumed"]
    assert sorted(assumed) == sorted(data(*line, "--runs", "0")["assumed"])
    assert {"iteration", "failure_rate", "shadow_nodes", "seeding"} <= set(assumed)
    assert set(assumed) <= set(DEFAULTS)


def test_yours_is_held_against_checkmate_too() -> None:
    code, output = invoke("--every", "30min", "--runs", "0")
    assert code == 0
    assert (
        "Compared with yours, a checkpoint every 393 iterations, Checkmate wastes 1,725,956 GPU-hours less, "
        "and costs $18.88 million less." in output
    )
    report = data("--every", "30min", "--runs", "0")
    _, yours, checkmate = report["schemes"]
    assert report["yours_saved_dollars"] == yours["dollars"] - checkmate["dollars"]
    without = data("--runs", "0")
    assert (without["yours_saved_gpu_hours"], without["yours_saved_dollars"]) == (None, None)
    assert "yours" not in invoke("--runs", "0")[1]


def test_a_stall_can_be_what_writing_takes() -> None:
    assert data("--parameters", "405B", "--storage", "2TB/s", "--runs", "0")["stall_s"] == pytest.approx(
        1.215
    )


def test_a_slowdown_costs_checkmate_alone() -> None:
    """In the closed form, and in the simulation."""
    without, with_ = data("--runs", "100"), data("--slowdown", "1%", "--runs", "100")
    assert "slowdown" in without["assumed"] and "slowdown" not in with_["assumed"]
    assert with_["slowdown"] == 0.01
    for (before, after), slowed in zip(
        zip(without["schemes"], with_["schemes"], strict=True), [0, 0.01 * 16_384 * 54 * 24], strict=True
    ):
        assert after["slowed_gpu_hours"] == pytest.approx(slowed)
        more = [scheme["wasted_gpu_hours"] for scheme in (before, after)]
        assert more[1] - more[0] == pytest.approx(slowed, rel=0.001)
        means = [scheme["simulated"]["wasted_gpu_hours_mean"] for scheme in (before, after)]
        assert means[1] - means[0] == pytest.approx(slowed, rel=0.01)
    assert with_["break_even_stall_s"] > without["break_even_stall_s"]


def test_recovery_in_place_is_a_column_of_its_own() -> None:
    """All GPUs wait after each failure; what the schemes lose besides is the paper's."""
    report = data("--restart", "10min", "--restart-in-place", "30s", "--runs", "0")
    best, checkmate, in_place = report["schemes"]
    assert [scheme["name"] for scheme in report["schemes"]][1:] == ["Checkmate", "Checkmate, in place"]
    waits = report["failures"] * 16_384 / 3600
    assert best["restarting_gpu_hours"] == checkmate["restarting_gpu_hours"] == pytest.approx(600 * waits)
    assert in_place["restarting_gpu_hours"] == pytest.approx(30 * waits)
    assert checkmate["wasted_gpu_hours"] - in_place["wasted_gpu_hours"] == pytest.approx(570 * waits)
    assert checkmate["repeated_gpu_hours"] == in_place["repeated_gpu_hours"]
    without = data("--runs", "0")
    assert report["saved_gpu_hours"] == pytest.approx(without["saved_gpu_hours"])
    assert len(without["schemes"]) == 2
    assert without["schemes"][0]["restarting_gpu_hours"] == 0


def test_restarts_cost_both() -> None:
    report = data("--restart", "5min", "--runs", "100")
    for scheme in report["schemes"]:
        assert scheme["simulated"]["restarting_gpu_hours_mean"] > 400 * 300 / 3600 * 16_384


def test_where_checkmate_costs_more_it_says_so() -> None:
    code, output = invoke("--gpus", "64", "--runs", "0")
    assert code == 0
    assert re.search(r"costs \$[\d,]+ more", output)


def test_the_example_of_the_page_works_and_options_go_over_it(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "cost.yaml"
    file.write_text(example)
    report = data(file, "--runs", "0")
    assert report["gpus"] == 1024
    assert [scheme["name"] for scheme in report["schemes"]] == [
        "conventional, best",
        "conventional, yours",
        "Checkmate",
    ]
    overridden = data(file, "--runs", "0", "--iteration", "1s", "--parameters", "8B", "--storage", "1GB/s")
    assert overridden["iteration_s"] == 1.0 != report["iteration_s"]
    assert overridden["stall_s"] == pytest.approx(48)


@pytest.mark.parametrize("command", re.findall(r"^checkmate cost[^#\n]*", DOC.read_text(), re.MULTILINE))
def test_the_commands_of_the_page_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cost.yaml").write_text("gpus: 512\nshadow_nodes: 8\n")
    code, output = invoke(*command.split()[2:], "--runs", "10")
    assert code == 0, output


def test_every_value_is_on_the_page_and_an_option() -> None:
    cells = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|", DOC.read_text(), re.MULTILINE)
    words = {name for row in cells for cell in (row[0], row[2]) for name in re.findall(r"`(\w+)`", cell)}
    assert {*CostInputs.model_fields, *ModelInputs.model_fields} <= words
    defaults = dict(
        pair
        for names, values, _ in cells
        for pair in zip(re.findall(r"`(\w+)`", names), values.split(", "), strict=False)
    )
    assert {key: defaults.get(key) for key in DEFAULTS} == dict(DEFAULTS)


def test_the_help_shows_the_defaults_that_there_are() -> None:
    group: Any = typer.main.get_command(app)
    options = {param.name: param for param in group.get_command(None, "cost").params}
    assert set(CostInputs.model_fields) - {"model"} <= set(options)
    for key, default in DEFAULTS.items():
        assert options[key].help.endswith(f"[default: {default}]"), key


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stall", "10"], "--stall: must be a time such as 10ms"),
        (["--stall", "10 parsecs"], "unit 'parsecs'"),
        (["--price", "-3"], "--price: must be dollars per hour such as 11.06, and not negative"),
        (["--gpus", "0"], "--gpus: must be between 1 and 10,000,000, not '0'"),
        (["--gpus", "16K"], "--gpus: must be a whole number"),
        (["--failure-rate", "0"], "--failure-rate: must be between"),
        (["--every", "0"], "--every: must be 'best', a number of iterations or a time"),
        (["--every", "60d"], "--every: the training (54 d) would be over before the first checkpoint"),
        (["--iteration", "2d", "--duration", "1d"], "--iteration: an iteration (2 d) takes longer"),
        (["--replicas", "200"], "--replicas: 200 holders of a shard need as many shadow nodes, not 128"),
        (["--dp-groups", "65", "--gpus", "64"], "--dp-groups: 65 DP groups need as many GPUs, not 64"),
        (["--shadow-nodes", "lots"], "--shadow-nodes: must be a whole number such as 16384, not 'lots'"),
        (["--parameters", "405B"], "--parameters: needs storage as well"),
        (["--parameters", "1B", "--storage", "1GB/s", "--stall", "1s"], "cannot be combined with stall"),
        (["--every", "30d"], "would make no progress"),
        (["--plot", "figures.pdf"], "--plot: figures.pdf must end in .png or .svg"),
        (["--plot", "no/such/folder.png"], "which is not a folder"),
        (["--plot", "no/such.SVGZ"], "must end in"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: list[str], says: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def test_every_fault_of_file_and_options_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "cost.yaml"
    file.write_text("gpus: many\nstall: 3\nstal: 3s\nmodel: {layers: 2, hidden: wide}\nduration: 1d\n")
    result = CliRunner().invoke(app, ["cost", str(file), "--price", "free", "--json"])
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    places = {(fault["line"], fault["path"]) for fault in report["faults"]}
    assert {(1, "gpus"), (2, "stall"), (3, "stal"), (0, "--price")} <= places
    assert {(4, "model.hidden"), (4, "model.ffn")} <= places
    assert report["error"] == f"{len(report['faults'])} faults in the values"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n", "must be a mapping of keys such as gpus: and stall:"),
        ("model: 405B\n", "must be a mapping of keys such as layers:"),
        ("model: {layers: 1, hidden: 100, ffn: 8, vocabulary: 8, heads: 3, kv_heads: 1, batch_tokens: 8,"
         " sequence: 8, achieved: 1TFLOPS}\n", "model.heads: must divide hidden"),
        ("iteration: 1s\nmodel: {}\n", "cannot be combined with iteration"),
        ("gpus: [\n", "(YAML)"),
        ("stall: null\n", "stall: has no value"),
        ("1: 2\n", "cost.yaml"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "cost.yaml"
    file.write_text(text)
    code, output = invoke(file)
    assert code == 2
    assert says in output
    assert "cost.yaml" in output


def test_the_model_counts_three_matrices_and_the_whole_projection() -> None:
    llama = {
        "layers": 126, "hidden": 16384, "ffn": 53248, "vocabulary": 128256, "heads": 128, "kv_heads": 8,
        "batch_tokens": 16 * 2**20, "sequence": 8192, "achieved": "400TFLOPS",
    }  # fmt: skip
    assert ModelInputs.model_validate(llama).iteration_s(16_384) == pytest.approx(6.75, abs=0.005)


def test_the_figures_are_pictures(tmp_path: Path) -> None:
    for name in ("cost.png", "cost.SVG", "again.svg"):
        code, output = invoke("--runs", "0", "--every", "30min", "--plot", tmp_path / name)
        assert code == 0
        assert f"figures: {tmp_path / name}".replace(" ", "") in output.replace(" ", "")
    with Image.open(tmp_path / "cost.png") as picture:
        assert picture.size[0] >= 1000
        assert len(picture.convert("L").getcolors() or []) > 50
    assert ElementTree.parse(tmp_path / "cost.SVG").getroot().tag.endswith("svg")
    assert (tmp_path / "cost.SVG").read_bytes() == (tmp_path / "again.svg").read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpus", "1", "--failure-rate", "1e-12"],
        ["--gpus", "1", "--slowdown", "60%"],
        *(
            pytest.param(option_line, marks=pytest.mark.slow)
            for option_line in (
                ["--stall", "0"],
                ["--slowdown", "2%"],
                ["--slowdown", "60%"],
                ["--gpus", "10,000,000", "--stall", "1h"],
                ["--duration", "1min", "--iteration", "50s"],
                ["--duration", "100y", "--iteration", "1us"],
            )
        ),
    ],
)
def test_extremes_are_drawn_too(arguments: list[str], tmp_path: Path) -> None:
    code, output = invoke(*arguments, "--runs", "0", "--plot", tmp_path / "x.png")
    assert code == 0, output


def test_without_the_extra_only_the_figures_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "checkmate.planner.cost.figures", raising=False)
    assert invoke("--runs", "0")[0] == 0
    code, output = invoke("--runs", "0", "--plot", tmp_path / "x.png")
    assert code == 2
    assert output.startswith("error: --plot needs matplotlib, which is not installed; install it with: pip ")
    assert not list(tmp_path.iterdir())


def test_the_command_line_loads_the_planner_only_when_asked() -> None:
    program = "import sys, checkmate.cli.main{}; sys.exit('checkmate.planner' in sys.modules)"
    for more, loaded in (("", 0), ("; import checkmate.planner.cost", 1)):
        result = subprocess.run([sys.executable, "-c", program.format(more)], check=False)
        assert result.returncode == loaded, more


def test_inputs_can_be_read_without_a_file() -> None:
    inputs = read_inputs(None, {"gpus": "8", "every": "30min", "iteration": "1s"})
    assert (inputs.gpus, inputs.every_iterations) == (8, 1800)
    assert yaml.safe_load("rate: 1e-6")["rate"] == "1e-6"  # YAML 1.1: text, which is read all the same
    assert read_inputs(None, {"failure_rate": "1e-6"}).failure_rate == 1e-6
