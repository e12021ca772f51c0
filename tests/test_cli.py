"""Every command, through `main` or as a process, with a toy trunk and small files."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jointrag import cli
from jointrag.data.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
# the log of the second process of a training is closed by the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
README = (ROOT / "README.md").read_text(encoding="utf-8")
Run = Callable[..., tuple[int, str, str]]
SMALL = (
    "data.corpus=corpus.jsonl data.train=train.jsonl data.dev=dev.jsonl data.test=test.jsonl index.dim=8 "
    "warm_start.questions=8 warm_start.steps=1 warm_start.batch=4 sft_more.steps=1 marl.updates=2 "
    "marl.episodes_per_update=4 marl.critic.warm_up=1 eval.questions=2 eval.test_questions=4 eval.bootstrap=50 "
    "eval.every=1 out=runs/mine"
).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `init` writes, its files cut to a few questions, and a toy trunk."""
    from jointrag.llm.toy import save_toy

    folder = tmp_path_factory.mktemp("cli")
    assert cli.main(["init", str(folder)]) == 0
    used: set[str] = set()
    for name, count in (("train", 12), ("dev", 2), ("test", 4)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[:count]
        used |= {i for line in lines for i in json.loads(line)["supporting_ids"]}
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    corpus = (folder / "corpus.jsonl").read_text().splitlines()
    kept = [line for k, line in enumerate(corpus) if k < 60 or json.loads(line)["id"] in used]
    (folder / "corpus.jsonl").write_text("\n".join(kept) + "\n")
    save_toy(folder / "toy")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("model: tiny", "model: toy"))
    return folder


@pytest.fixture
def run(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in the folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(place)

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(list(argv))
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The folder with a finished run in runs/mine."""
    before = Path.cwd()
    os.chdir(place)
    try:
        assert cli.main(["train", "config.yaml", *SMALL]) == 0
    finally:
        os.chdir(before)
    return place


def process(place: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jointrag.cli", *argv],
        cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip


# what it costs to ask for help


def test_help_imports_no_torch_and_takes_less_than_half_a_second() -> None:
    code = (
        "import sys, time; start = time.process_time(); from jointrag.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'transformers', 'langgraph', 'pydantic', 'numpy'} & set(sys.modules); "
        "print(code, sorted(heavy), time.process_time() - start < 0.5, file=sys.stderr)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=clean)
    assert done.stderr.strip() == "0 [] True"
    assert all(c in done.stdout for c in ("demo", "init", "train", "eval", "ask", "graph", "index", "world", "report"))


@pytest.mark.parametrize("command", ["demo", "init", "train", "eval", "ask", "graph", "index", "world", "report"])
def test_every_command_explains_itself(command: str, run: Run) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"jointrag {command}" in out


# results


def test_a_trained_run_has_its_files_and_train_prints_its_table(trained: Path, run: Run) -> None:
    have = {p.name for p in (trained / "runs/mine").iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "timing.jsonl",
        "eval.json",
        "eval.rows.jsonl",
        "heads",
        "report.html",
    } <= have


def test_dry_run_prints_the_plan_and_writes_nothing(run: Run, place: Path) -> None:
    code, out, _ = run("train", "config.yaml", *SMALL, "out=runs/dry", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert list(plan["agents"]) == ["rewriter", "retriever", "filter", "summariser", "answerer"]
    assert plan["agents"]["rewriter"]["parameters"] > 0
    assert (plan["episodes"], plan["questions"], plan["out_holds_a_run"]) == (
        8,
        {"train": 12, "dev": 2, "test": 4},
        False,
    )
    assert not (place / "runs/dry").exists()
    code, out, _ = run("train", "config.yaml", "--dry-run", *SMALL)  # flags and key=value in any order
    assert code == 0
    assert "2 updates x 4 episodes = 8 episodes" in out


def test_ask_json_has_the_shape_of_the_interface(trained: Path, run: Run) -> None:
    code, out, _ = run("ask", "runs/mine", "Who ?", "--json")
    said = json.loads(out)
    assert code == 0
    assert set(said) == {"question", "answer", "evidence", "steps"}
    assert all(set(e) == {"id", "title"} for e in said["evidence"])
    assert said["steps"]
    assert all(set(s) == {"node", "hop", "action", "update"} for s in said["steps"])
    assert [s["node"] for s in said["steps"]][-1] == "answerer"


def test_ask_without_a_run_answers_by_the_shipped_heads(run: Run) -> None:
    code, out, _ = run("ask", "Name the employer of Rimus Owl .", "--json")  # an alias, told in one passage only
    said = json.loads(out)
    assert (code, said["answer"]) == (0, "Dilul Trust")
    assert [e["title"] for e in said["evidence"]] == ["Sanith Seton", "Sanith Seton"]
    assert not (ROOT / "llm/tiny/demo/index").exists()  # answering writes nothing


def test_eval_of_an_unchanged_run_gives_its_own_bytes(trained: Path, run: Run) -> None:
    folder = trained / "runs/mine"
    before = (folder / "eval.json").read_bytes(), (folder / "eval.rows.jsonl").read_bytes()
    code, out, _ = run("eval", "runs/mine", "--json")
    assert code == 0
    assert json.loads(out)["file"] == "runs/mine/eval.json"
    assert ((folder / "eval.json").read_bytes(), (folder / "eval.rows.jsonl").read_bytes()) == before


def test_eval_with_other_settings_writes_beside(trained: Path, run: Run) -> None:
    before = (trained / "runs/mine/eval.json").read_bytes()
    code, out, _ = run("eval", "runs/mine", "agents.filter.mode=default", "eval.test_questions=2", "--json")
    said = json.loads(out)
    assert code == 0
    assert re.fullmatch(r"runs/mine/eval\.[0-9a-f]{8}\.json", said["file"])
    assert said["eval"]["changed"] == ["agents.filter.mode=default", "eval.test_questions=2"]
    assert (said["eval"]["n"], json.loads((trained / said["file"]).read_text())) == (2, said["eval"])
    assert (trained / "runs/mine/eval.json").read_bytes() == before


def test_eval_on_another_corpus_leaves_the_index_of_the_run(trained: Path, run: Run) -> None:
    before = (trained / "runs/mine/index/manifest.json").read_bytes()
    lines = (trained / "corpus.jsonl").read_text().splitlines()
    (trained / "more.jsonl").write_text("\n".join([*lines, '{"id": "new", "title": "New", "text": "a new passage"}\n']))
    assert run("eval", "runs/mine", "data.corpus=more.jsonl", "eval.test_questions=2")[0] == 0
    assert (trained / "runs/mine/index/manifest.json").read_bytes() == before


def test_graph_prints_mermaid_of_a_config_without_data(run: Run) -> None:
    code, out, _ = run("graph", "graph/two_hops")
    assert code == 0
    assert "graph TD;" in out
    assert "rewriter" in json.loads(run("graph", "config.yaml", "--json")[1])["agents"]


def test_index_build_writes_what_pipeline_opens(run: Run, place: Path) -> None:
    from jointrag.retrieval.store import open_index

    code, out, _ = run("index", "build", "config.yaml", *SMALL, "out=idx", "--json")
    assert code == 0
    assert json.loads(out)["index"] == "idx"
    assert len(open_index(place / "idx")) == json.loads(out)["passages"]


def test_index_eval_tells_recall(run: Run) -> None:
    code, out, err = run("index", "eval", "config.yaml", *SMALL, "out=runs/none", "--json")
    said = json.loads(out)
    assert code == 0, err
    assert 0 <= said["recall@2"] <= said["recall@5"] <= said["recall@10"] <= 1


def test_world_describes_itself_and_its_table_has_every_combination(run: Run) -> None:
    small = ["data.world.passages=500", "data.world.train_questions=1", "data.world.dev_questions=1"]
    said = json.loads(run("world", *small, "data.world.test_questions=60", "--json")[1])
    assert abs(sum(said["kinds"].values()) - 1) < 1e-9
    assert len(said["examples"]) == 3
    assert all(e["gold"] for e in said["examples"])
    code, out, _ = run("world", "--table", *small, "data.world.test_questions=6", "index.dim=8", "--json")
    said = json.loads(out)
    assert (code, said["questions"], len(said["combinations"])) == (0, 6, 16)
    assert list(said["worth"]) == ["rewriter", "retriever", "filter", "answerer"]
    assert said["combinations"][-1]["f1"] > said["combinations"][0]["f1"]


def test_report_is_written_anew(trained: Path, run: Run) -> None:
    (trained / "runs/mine/report.html").unlink()
    assert run("report", "runs/mine")[0] == 0
    assert (trained / "runs/mine/report.html").stat().st_size > 1000


def test_a_finished_run_resumes_to_the_same_numbers(trained: Path, run: Run) -> None:
    before = (trained / "runs/mine/eval.json").read_bytes()
    code, out, _ = run("train", "config.yaml", "--resume", *SMALL, "--json")
    assert (code, json.loads(out)["run"]) == (0, "runs/mine")
    assert (trained / "runs/mine/eval.json").read_bytes() == before


# demo


def test_demo_goes_on_where_it_stopped_and_prints_a_finished_table(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def note(_config: Any, resume: bool, *_: Any) -> tuple[dict[str, Any], str]:
        calls.append(resume)
        return {}, ""

    monkeypatch.setattr(cli, "_train", note)
    assert run("demo", "--quick", "out=runs/d")[0] == 0
    from jointrag.configs.load import dump_config, load_config

    config = load_config("demo", [*cli.QUICK, "out=runs/d"])
    folder = place / "runs/d"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint/state.pt").write_bytes(b"")
    (folder / "config.yaml").write_text(dump_config(config))
    assert run("demo", "--quick", "out=runs/d")[0] == 0
    assert calls == [False, True]
    code, _, err = run("demo", "--quick", "out=runs/d", "marl.updates=9")
    assert (code, "marl.updates is 5 there and 9 here" in err) == (2, True)
    block = {"f1": {"mean": 0.5, "interval": [0.4, 0.6]}}
    (folder / "eval.json").write_text(json.dumps({"n": 3, "seed": 0, "after": block}))
    code, out, err = run("demo", "--quick", "out=runs/d")
    assert (code, "0.500" in out, "is finished" in err, len(calls)) == (0, True, True, 2)


# bad input: exit code 2, one message, no traceback, nothing on stdout

BAD = {
    "no command": ([], "required"),
    "an unknown block of eval.json": (
        ["train", "config.yaml", *SMALL, "--dry-run", "eval.variants=[aftr]"],
        "Did you mean 'after'",
    ),
    "a swapped head that is not there": (
        ["train", "config.yaml", *SMALL, "--dry-run", "agents.filter.mode={swap: nope}"],
        "agents.filter.mode.swap: nope: no readable head",
    ),
    "an out that is a file itself": (
        ["train", "config.yaml", *SMALL, "--dry-run", "out=config.yaml"],
        "which is a file",
    ),
    "an index that never answers": (
        ["train", "config.yaml", *SMALL, "--dry-run", "index.type=http", "index.url=http://127.0.0.1:9/"],
        "every search failed",
    ),
    "a head that would leave its folder": (
        ["train", "config.yaml", *SMALL, "--dry-run", 'llm.heads={"..": [rewriter, filter]}'],
        "as the name of an agent or a head",
    ),
    "a frozen agent whose head others train": (
        ["train", "config.yaml", *SMALL, "--dry-run", "llm.heads=shared", "agents.filter.mode=frozen"],
        "write `mode: warm`",
    ),
    "an unknown command": (["trian"], "invalid choice"),
    "an unknown flag": (["train", "config.yaml", "--resme"], "Did you mean '--resume'"),
    "no config": (["train"], "CONFIG"),
    "a config that does not exist": (["train", "cofnig.yaml"], "Did you mean 'config.yaml'"),
    "an unknown key": (["train", "config.yaml", "marl.update=3"], "Did you mean 'updates'"),
    "a value of a wrong type": (["train", "config.yaml", "marl.updates=many"], "marl.updates"),
    "an override without a value": (["train", "config.yaml", "marl.updates"], "key=value"),
    "a question file that does not exist": (
        ["train", "config.yaml", "data.train=nope.jsonl", "--dry-run"],
        "nope.jsonl",
    ),
    "a trunk that does not exist": (["train", "config.yaml", *SMALL, "llm.model=./nope", "--dry-run"], "llm.model"),
    "an unknown reward": (["train", "config.yaml", *SMALL, "rewards.team=[{type: f2}]", "--dry-run"], "f2"),
    "an unknown algorithm": (["train", "config.yaml", *SMALL, "marl.algorithm=mapo", "--dry-run"], "mapo"),
    "an unknown index": (["train", "config.yaml", *SMALL, "index.type=bm52", "--dry-run"], "Did you mean 'bm25'"),
    "an unknown agent": (["train", "config.yaml", *SMALL, "agents.fliter.mode=frozen", "--dry-run"], "fliter"),
    "an unknown node type": (["graph", "config.yaml", "graph.nodes.filter.type=evidense_filter"], "evidence_filter"),
    "an out that is a file": (["train", "config.yaml", *SMALL, "out=config.yaml/run"], "config.yaml/run"),
    "no run": (["eval", "runs/nope"], "no such folder"),
    "a folder that is no run": (["eval", "toy"], "no run folder"),
    "a report of no run": (["report", "toy"], "no run folder"),
    "a question to no run": (["ask", "runs/nope", "Who ?"], "no such folder"),
    "an empty question": (["ask", "runs/nope", "  "], "empty question"),
    "three words to ask": (["ask", "runs/nope", "who", "is"], "in quotes"),
    "an index of nothing": (["index", "build", "graph/nope"], "no such file"),
    "no index command": (["index"], "required"),
    "an index on top of other files": (["index", "build", "config.yaml", *SMALL, "out=toy"], "holds something else"),
    "a world of files": (["world", "data.world=null", "data.corpus=corpus.jsonl"], "built-in world"),
    "a world too small": (["world", "data.world.passages=3"], "passages"),
    "init over files": (["init", "."], "holds config.yaml"),
    "init into a file": (["init", "config.yaml"], "config.yaml"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_message(case: str, run: Run) -> None:
    argv, expected = BAD[case]
    code, out, err = run(*argv)
    assert code == 2, err
    assert expected in err
    assert "Traceback" not in err
    assert out == ""


def test_a_damaged_run_is_not_trained_over(trained: Path, run: Run) -> None:
    shutil.copytree(trained / "runs/mine", trained / "runs/damaged")
    (trained / "runs/damaged/checkpoint/state.pt").unlink()
    for more in ([], ["--resume"]):
        code, _, err = run("train", "config.yaml", *SMALL, "out=runs/damaged", *more)
        assert (code, "without its checkpoint" in err) == (2, True), err
    (trained / "runs/damaged/warm.json").write_text("[]")
    code, _, err = run("eval", "runs/damaged")
    assert (code, "warm.json cannot be read" in err) == (2, True), err


def test_a_folder_of_any_name_takes_the_files_to_start_from(run: Run, place: Path) -> None:
    code, _, err = run("init", 'we ird: "dir')
    assert code == 0, err
    code, _, err = run("train", 'we ird: "dir/config.yaml', "--dry-run")
    assert code == 0, err


def test_bad_input_about_a_run(trained: Path, run: Run) -> None:
    cases = {
        ("train", "config.yaml", *SMALL): "go on with --resume",
        ("train", "config.yaml", *SMALL, "--resume", "marl.clip=0.1"): "marl.clip is 0.2 there and 0.1 here",
        ("eval", "runs/mine", "marl.updates=3"): "setting of training",
        ("eval", "runs/mine", "out=runs/other"): "setting of training",
        ("eval", "runs/mine", "llm.lora.r=8"): "",
        ("ask", "runs/mine"): "no question",
    }
    for argv, expected in cases.items():
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), (argv, err)
        assert expected in err
        assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_told(run: Run, place: Path) -> None:
    (place / "locked").mkdir()
    (place / "locked").chmod(0o500)
    for argv in (["init", "locked/x"], ["train", "config.yaml", *SMALL, "out=locked/run"]):
        code, _, err = run(*argv)
        assert (code, "Traceback" in err) == (2, False)


def test_a_full_disk_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "runs/x")

    monkeypatch.setattr(cli, "graph", full)
    code, _, err = run("graph", "config.yaml")
    assert (code, "No space left" in err, "Traceback" in err) == (2, True, False)


def test_a_defect_of_ours_is_1_with_a_traceback_and_where_to_report_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "graph", lambda *_: 1 / 0)
    code, out, err = run("graph", "config.yaml")
    assert (code, out) == (1, "")
    assert "ZeroDivisionError" in err
    assert "report it" in err


# being stopped, and starting well


def test_a_stopped_training_saves_its_state_and_goes_on(place: Path) -> None:
    argv = ["train", "config.yaml", *SMALL, "marl.updates=500", "eval.every=500", "out=runs/stopped"]
    child = process(place, *argv)
    metrics = place / "runs/stopped/metrics.jsonl"
    for _ in range(600):
        if child.poll() is not None or (metrics.exists() and metrics.stat().st_size):
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, ""), err
    assert "state saved in runs/stopped after update" in err
    assert "--resume" in err
    assert "Traceback" not in err


def test_an_interrupt_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(cli, "graph", stop)
    code, _, err = run("graph", "config.yaml")
    assert (code, err.strip()) == (130, "interrupted")


def test_a_heavy_command_restarts_once_with_the_allocator_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, _argv, env: seen.append(env))
    monkeypatch.delenv(cli.RESTARTED, raising=False)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    cli._restart(["train", "config.yaml"])
    cli._restart(["graph", "config.yaml"])
    cli._restart(["train", "config.yaml", "--dry-run"])
    monkeypatch.setenv(cli.RESTARTED, "yes")
    cli._restart(["train", "config.yaml"])
    (env,) = seen
    assert env["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    assert env["MALLOC_TOP_PAD_"] == "1"  # the user's own
    assert env["OMP_WAIT_POLICY"]
    assert env[cli.RESTARTED]


# the README and the examples


def test_the_tree_of_the_readme_is_the_tree_of_the_repository() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        pytest.skip("no git here")
    real = {name for name in done.stdout.split("\n") if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}
    told: dict[str, str] = {}
    above: list[str] = []
    for line in README.split("## Files")[1].split("```")[1].splitlines()[1:]:
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        name, *words = line.split()
        path = "".join([*above[:depth], name])
        if name.endswith("/"):
            above = [*above[:depth], name]
        if words:
            told[path] = " ".join(words)
            assert len(words) <= 6, f"{path}: {len(words)} words, expected at most six"
    folders = tuple(path for path in told if path.endswith("/"))  # a folder with words stands for all its files
    missing = sorted(name for name in real - set(told) if not name.startswith(folders))
    assert missing == [], "add them to the tree of the README, with at most six words each"
    gone = sorted(p for p in told if not (ROOT / p).exists() and not (ROOT / p).is_symlink())
    assert gone == [], "remove them from the tree of the README"


def test_the_config_of_the_readme_is_valid_and_short(tmp_path: Path) -> None:
    from jointrag.configs.load import load_config

    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    assert len(text.strip().splitlines()) <= 15
    (tmp_path / "config.yaml").write_text(text)
    load_config(tmp_path / "config.yaml")


@pytest.fixture
def quick_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that leave the settings to the defaults train for a moment only."""
    from jointrag.configs.schema import Config, CriticConfig, EvalConfig, MarlConfig, WarmStartConfig

    small = Config(
        warm_start=WarmStartConfig(questions=4, steps=1, batch=4, forms="title"),
        marl=MarlConfig(updates=1, episodes_per_update=2, critic=CriticConfig(warm_up=0)),
        eval=EvalConfig(questions=2),
    )
    monkeypatch.setattr("jointrag.marl.trainer.Config", lambda: small)


def test_the_program_of_the_readme_runs(
    trained: Path, run: Run, quick_trainer: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(text.strip().splitlines()) <= 20
    assert run("index", "build", "config.yaml", *SMALL, "out=my/index")[0] == 0
    for name in ("train", "dev", "test"):
        (trained / f"my/{name}.jsonl").write_text((trained / f"{name}.jsonl").read_text())
    text = text.replace('"tiny"', '"toy"')
    text = re.sub(r"updates=\d+", "updates=1", text)
    exec(compile(text, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_examples_run(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(trained)
    by_hand = runpy.run_path(str(ROOT / "examples/by_hand.py"))
    by_hand["main"]("toy", "runs/by_hand", updates=1, episodes=2, steps=1, questions=3)
    assert "without the filter: F1" in capsys.readouterr().out
    own = runpy.run_path(str(ROOT / "examples/own_agent.py"))
    files = ["data={corpus: corpus.jsonl, train: train.jsonl, dev: dev.jsonl, test: test.jsonl}"]
    own["main"]("toy", "runs/own", *files, *(x for x in SMALL if not x.startswith(("data", "out"))))
    assert "without_checker" in capsys.readouterr().out


# the lab


def test_ablate_on_a_run_compares_every_mode_of_every_agent_and_shows_it_in_the_report(trained: Path, run: Run) -> None:
    code, out, _ = run("ablate", "runs/mine", "--json", "--swap", "filter=runs/mine/heads/filter")
    found = json.loads(out)
    arms = {row["arm"]: row for row in found["rows"]}
    assert code == 0 and {"full", "filter=default", "filter=swap", "rewriter=oracle", "answerer=trunk"} <= set(arms)
    assert arms["filter=swap"]["minus_full"]["mean"] == 0.0  # its own head
    assert set(arms["filter=default"]["minus_full"]) == {"mean", "interval", "p", "p_holm"}
    assert json.loads((trained / "runs/mine/ablate.json").read_text())["rows"] == found["rows"]
    assert '<h2 id="ablation">' in (trained / "runs/mine/report.html").read_text()
    code, _, err = run("ablate", "runs/mine", "--drop", "filter")
    assert code == 2 and "got --drop for the run" in err


def test_ablate_on_a_config_trains_each_arm_once_on_one_warm_start(trained: Path, run: Run) -> None:
    common = json.dumps([s for s in SMALL if not s.startswith("out")])
    grid = f"config: config.yaml\nseeds: [4]\ndrop: [filter]\nout: runs/grid\ncommon: {common}\n"
    (trained / "grid.yaml").write_text(grid)
    code, out, err = run("ablate", "grid.yaml", "--workers", "1", "--json")
    assert code == 0 and "2 arms x 1 seeds = 2 runs" in err and "1 min to 1 min each on one core" in err
    assert [row["arm"] for row in json.loads(out)["rows"]] == ["full", "drop filter"]
    assert (trained / "runs/grid/drop-filter-4/heads").is_dir()
    head = "warm/rewriter/adapter_model.safetensors"
    full, dropped = (trained / f"runs/grid/{arm}-4" / head for arm in ("full", "drop-filter"))
    assert full.read_bytes() == dropped.read_bytes()
    code, out, err = run("ablate", "grid.yaml", "--workers", "1")
    assert code == 0 and "started" not in err and "drop filter" in out  # done already


def test_credit_says_what_each_node_of_a_run_is_worth(trained: Path, run: Run) -> None:
    code, out, _ = run("credit", "runs/mine", "--json", "--questions", "3")
    found = json.loads(out)
    assert code == 0 and found["n"] == 3 and {r["agent"] for r in found["rows"]} >= {"rewriter", "answerer"}
    share = [r["advantage_share"] for r in found["rows"] if "advantage_share" in r]
    assert sum(share) == pytest.approx(1.0)
    assert '<h2 id="credit">' in (trained / "runs/mine/report.html").read_text()
    for wrong in (("--rule", "voting"), ("--questions", "0")):
        assert run("credit", "runs/mine", *wrong)[0] == 2


def test_ablate_on_several_runs_is_one_table_over_them(trained: Path, run: Run) -> None:
    shutil.copytree(trained / "runs/mine", trained / "runs/again", dirs_exist_ok=True)
    code, out, _ = run("ablate", "runs/mine", "runs/again", "--out", "runs/both", "--json")
    found = json.loads(out)
    one = json.loads((trained / "runs/again/ablate.json").read_text())
    assert code == 0 and (found["seeds"], found["n"]) == (2, 8)
    assert [r["f1"]["mean"] for r in found["rows"]] == pytest.approx([r["f1"]["mean"] for r in one["rows"]])
    assert "not been evaluated" not in (trained / "runs/both/report.html").read_text()
    for wrong in (("runs/mine",), ("seed=1",), ("runs/nothere",), ("runs/again", "--out", "runs/mine")):
        assert run("ablate", "runs/mine", *wrong)[0] == 2


def test_a_run_trained_from_python_is_measured_with_its_pipeline(trained: Path, run: Run) -> None:
    from jointrag.configs.load import dump_config, load_run
    from jointrag.configs.schema import DataConfig
    from jointrag.lab.ablate import ablate_run
    from jointrag.lab.credit_report import report
    from jointrag.marl.run import prepare, test_questions

    own, folder = trained / "runs/mine", trained / "runs/python"
    assert run("ablate", "runs/mine")[0] == 0 == run("credit", "runs/mine")[0]
    shutil.copytree(own, folder, ignore=shutil.ignore_patterns("warm", "warm.json", "ablate*", "credit*"))
    (folder / "config.yaml").write_text(dump_config(load_run(own).model_copy(update={"data": DataConfig()})))
    job = prepare(load_run(own))  # as built for training: none of the run's heads is loaded yet
    given: Any = {"pipeline": job.pipeline, "questions": test_questions(job)}
    rows = [r for r in json.loads((own / "ablate.json").read_text())["rows"] if not r["arm"].endswith("=warm")]
    found = ablate_run(folder, **given)["rows"]
    assert [(r["arm"], r["f1"], r["tokens"]) for r in found] == [(r["arm"], r["f1"], r["tokens"]) for r in rows]
    assert report(folder, **given)["rows"] == json.loads((own / "credit.json").read_text())["rows"]
    with pytest.raises(DataError, match="got a pipeline and no questions"):
        report(folder, pipeline=job.pipeline)
    code, _, err = run("credit", "runs/nothere")
    assert code == 2 and "expected one written by `jointrag train`" in err


def test_lint_ends_with_2_where_rewards_are_to_be_mended(place: Path, run: Run) -> None:
    assert run("lint", "config.yaml")[:2] == (0, "nothing found\n")
    code, out, _ = run("lint", "config.yaml", "rewards.team=[{type: f1}]", "--json")
    assert code == 2 and {f["check"] for f in json.loads(out)["findings"]} == {"no answer", "free unknown"}


def test_the_planted_reward_of_the_examples_is_found(place: Path) -> None:
    done = process(place, "lint", str(ROOT / "examples/collapse.yaml"), "--json")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 2, err
    found = json.loads(out)["findings"]
    assert {f["term"] for f in found} == {"answerer.silence"} and "free unknown" in {f["check"] for f in found}


def test_eval_under_other_conditions_is_one_table(trained: Path, run: Run) -> None:
    (trained / "other.yaml").write_text("extends: config.yaml\ndata: {test: dev.jsonl}\n")
    code, out, _ = run("eval", "runs/mine", "--index", "{type: dense, dim: 8}", "--data", "other.yaml", "--json")
    found = json.loads(out)["rows"]
    assert code == 0 and [r["condition"] for r in found] == ["own", "index {type: dense, dim: 8}", "data other"]
    assert [r["n"] for r in found] == [4, 4, 2] and all("after_minus_before" in r for r in found)
    own = json.loads((trained / "runs/mine/eval.json").read_text())
    assert found[0]["after"]["f1"] == own["after"]["f1"]
    for wrong, told in ((("--world", "unseen"), "got a run on files"), (("--index", "bm26"), "bm26")):
        code, _, err = run("eval", "runs/mine", *wrong)
        assert code == 2 and told in err


def test_pareto_sweeps_budgets_and_marks_the_frontier(trained: Path, run: Run) -> None:
    sets = [s for s in SMALL if not s.startswith("out")]
    code, out, _ = run("pareto", "config.yaml", *sets, "--budgets", "1", "--seeds", "4", "--out", "runs/p", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and {r["arm"] for r in rows} == {"no budget", "1 searches"}
    assert any(r["on_frontier"] for r in rows)
    page = (trained / "runs/p/pareto.html").read_text()
    assert "F1 against searches a question" in page and "<svg" in page
    assert run("pareto", "config.yaml", "--budgets", "0")[0] == 2


# folders that are no run


def test_what_is_no_run_folder_is_told_apart(trained: Path, run: Run) -> None:
    for path, told in (
        ("config.yaml", "got a config, expected the folder of its run, which is runs/mine"),
        (".", "expected one written by `jointrag train`; the run of config.yaml is runs/mine"),
        ("runs/nothere", "got no such folder"),
    ):
        code, _, err = run("eval", path)
        assert code == 2 and told in err, err


def test_a_run_trained_from_python_says_how_to_use_it(trained: Path, run: Run) -> None:
    from jointrag.configs.load import dump_config
    from jointrag.configs.schema import Config

    folder = trained / "by-hand"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(Config()))
    (folder / "metrics.jsonl").write_text("")
    code, _, err = run("ask", "by-hand", "Who ?")
    assert code == 2 and "jointrag.load('by-hand', pipeline=...)" in err
    assert run("report", "by-hand")[0] == 0  # its curves need no data


def test_a_misspelt_command_has_a_suggestion_and_a_flag_of_place(run: Run) -> None:
    assert "Did you mean 'train'?" in run("trian", "config.yaml")[2]
    assert "It goes after the command." in run("--json", "graph", "demo")[2]
