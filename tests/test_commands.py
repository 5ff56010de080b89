"""The commands as a user meets them: what they print, and what they say to mistakes."""
import ast
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, run

import bench
import hydra
import measure
import train

BUDGET = dict(model=260, tokenizer=160, tree=330, medusa=180, hydra=340, vocabtrim=180, train=360,
              measure=330, bench=360)
ABSENT = "cuda" if torch.backends.mps.is_available() else "mps"
TINY = ["--vocab-size", "300", "--n-layer", "1", "--n-embd", "32", "--n-inner", "32",
        "--block-size", "48", "--length", "24", "--base-seconds", "1", "--heads-seconds", "1",
        "--text-seconds", "1", "--text-rows", "16", "--calibration", "16"]


def sentence(capsys):
    """What stderr got: it has to be one line, stdout nothing."""
    got = capsys.readouterr()
    assert got.err.count("\n") == 1 and "Traceback" not in got.err and got.out == "", got
    return got.err


def result_vocabulary(out):
    return torch.load(out / "base.pt")["config"]["vocab_size"]


def test_same_ids_for_all_heads_and_trees(out, monkeypatch, capsys):
    texts = []
    for heads in ("none", "lookup", *hydra.KINDS):
        for tree in ("auto", "chain", "dynamic", "1", "16", "[[0],[1],[0,0]]"):
            code = run(monkeypatch, hydra, "--prompt", "def f(", "--out", out, f"--heads={heads}",
                       f"--tree={tree}", "--json", "--max-new-tokens", 20)
            assert code == 0
            result = json.loads(capsys.readouterr().out)
            assert set(result) == {"prompt_ids", "ids", "text", "finish", "steps",
                                   "tokens_per_step", "accepted", "seconds", "prompt_seconds",
                                   "heads", "tree_nodes", "trim"}
            assert sum(result["accepted"]) == len(result["ids"]) - 1
            assert result["heads"] == heads
            kept = (0, result_vocabulary(out) // 8, result_vocabulary(out) // 4)
            assert result["trim"] in kept[:3 if heads in hydra.KINDS else 1]
            assert heads != "none" or set(result["accepted"]) == {1}
            texts.append(result["ids"])
    assert all(ids == texts[0] for ids in texts) and len(texts[0]) == 20


def test_a_seed_fixes_the_text_with_and_without_heads(out, monkeypatch, capsys):
    texts = {}
    for seed in (7, 8):
        for heads in ("none", "lookup", *hydra.KINDS):
            for tree in ("chain", "16", "dynamic"):
                assert run(monkeypatch, hydra, "--prompt", "def f(", "--out", out, "--heads", heads,
                           "--tree", tree, "--seed", seed, "--temperature", "0.8", "--top-p=0.95",
                           "--json") == 0
                ids = json.loads(capsys.readouterr().out)["ids"]
                assert texts.setdefault(seed, ids) == ids
    assert texts[7] != texts[8]


def test_trace_shows_each_steps_tree(out, monkeypatch, capsys):
    arguments = ["--prompt", "def f(", "--out", out, "--heads", "hydra", "--tree", "[[0],[1]]",
                 "--max-new-tokens", 9]
    assert run(monkeypatch, hydra, *arguments) == 0
    plain = capsys.readouterr()
    assert run(monkeypatch, hydra, *arguments, "--trace") == 0
    traced = capsys.readouterr()
    assert traced.out == plain.out and "\33" not in traced.out + traced.err  # no terminal
    steps = int(plain.err.split(" steps")[0].split()[-1])
    assert traced.err.count("\n> ") == int(plain.err.split("] ")[1].split()[0]) - 1 >= steps


def test_more_ids_than_ever_came_are_filled_up_and_that_is_said(out, monkeypatch, capsys):
    V = result_vocabulary(out)
    assert run(monkeypatch, hydra, "--prompt", "x", "--out", out, "--trim", V, "--json") == 0
    got = capsys.readouterr()
    assert f"ids came in the counted text: filled up to {V}" in got.err
    assert json.loads(got.out)["trim"] == V


def test_typical_says_that_it_is_lossy(out, monkeypatch, capsys):
    assert run(monkeypatch, hydra, "--prompt", "x", "--out", out, "--typical",
               "--temperature", "1") == 0
    assert "lossy" in capsys.readouterr().err.splitlines()[0]


def test_text_and_figures(out, monkeypatch, capsys):
    """The text on stdout is the JSON's text, also where tokens cut a character in two."""
    arguments = ["--prompt", "é漢", "--out", out, "--max-new-tokens", 9]
    assert run(monkeypatch, hydra, *arguments, "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert run(monkeypatch, hydra, *arguments) == 0
    got = capsys.readouterr()
    assert got.out == text + "\n"
    assert got.err.count("\n") == 1 and "tokens per step" in got.err and "[hydra" in got.err
    assert run(monkeypatch, hydra, "--prompt", "x", "--out", out, "--max-new-tokens", 0) == 0
    assert capsys.readouterr().out == "\n"


def test_streamed_bytes_become_whole_characters(capsys):
    from tokenizer import Tokenizer
    show = hydra.printer(Tokenizer([]))
    for byte in "aé漢".encode()[:-1]:
        show([byte])
    show([], final=True)
    assert capsys.readouterr().out == "aé\ufffd"


@pytest.mark.parametrize("arguments, message", [
    (["--prompt", ""], "the prompt has 0 tokens; 1 to 256 fit"),
    (["--prompt", "x = 1\n" * 400], "tokens; 1 to 256 fit"),
    (["--prompt", "x", "--heads", "eagle"], "invalid choice: 'eagle'"),
    (["--prompt", "x", "--max-new-tokens", "-1"], "-1 isn't a number from 0 to"),
    (["--prompt", "x", "--max-new-tokens", "many"], "'many'"),
    (["--prompt", "x", "--tree", "0"], "--tree 0"),
    (["--prompt", "x", "--tree", "[[0,0]]"], "path [0, 0] has no parent [0]"),
    (["--prompt", "x", "--tree", "[[0],[0]]"], "path [0] is there twice"),
    (["--prompt", "x", "--tree", "[0]"], "no list of lists"),
    (["--prompt", "x", "--tree", "bush"], "say auto, chain"),
    (["--prompt", "x", "--tree", "[[0],[0,0],[0,0,0],[0,0,0,0],[0,0,0,0,0]]"],
     "deeper than the 4 heads"),
    (["--prompt", "x", "--tree", "[[9999]]"], "path [9999] has a rank beyond"),
    (["--prompt", "x", "--trim", "-1"], "-1 isn't a number from 0 to"),
    (["--prompt", "x", "--trim", "some"], "'some'"),
    (["--prompt", "x", "--trim", "9999"], "--trim 9999: the vocabulary has only"),
    (["--prompt", "x", "--bush"], "--bush"),
    (["--prompt", "x", "--temperature", "-0.1"], "-0.1 isn't a number from 0 to"),
    (["--prompt", "x", "--temperature", "nan"], "nan isn't a number from 0 to"),
    (["--prompt", "x", "--top-k", "-1"], "-1 isn't a number from 0 to"),
    (["--prompt", "x", "--top-p", "0"], "0 isn't a number from 1e-09 to 1"),
    (["--prompt", "x", "--top-p", "1.5"], "1.5 isn't a number from 1e-09 to 1"),
    ([], "--prompt"),
    (["--prompt", "x", "--device", ABSENT], f"--device {ABSENT}"),
    (["--prompt", "x", "--tree", "[[true]]"], "isn't a list of ranks"),
    (["--prompt", "x", "--tree", "9" * 5000], "--tree 9999"),
    (["--prompt", "x", "--tree", "[" * 99999], "--tree [[["),
    (["--prompt", "x", "--tree", f"[[{10**30}]]"], "isn't a list of ranks"),
    (["--prompt", "x", "--seed", str(2**64)], "isn't a number from"),
])
def test_mistakes_get_one_sentence(out, arguments, message, monkeypatch, capsys):
    assert run(monkeypatch, hydra, "--out", out, *arguments) == 2
    assert message in sentence(capsys)


def test_damaged_folders(out, tmp_path, monkeypatch, capsys):
    def refused(message, *arguments):
        assert run(monkeypatch, hydra, "--prompt", "x", "--out", tmp_path, *arguments) == 2
        assert message in sentence(capsys)
    refused("run `python train.py` first")
    base, heads = (out / "base.pt").read_bytes(), torch.load(out / "hydra.pt")
    (tmp_path / "base.pt").write_bytes(base[:999])
    refused("cut short or no checkpoint")
    (tmp_path / "base.pt").write_bytes(base)
    assert run(monkeypatch, hydra, "--prompt", "x", "--out", tmp_path, "--json") == 0  # plain, then
    assert json.loads(capsys.readouterr().out)["heads"] == "none"
    refused("hydra.pt isn't there", "--heads", "hydra")
    for change, message in [({"base": "0"}, "another base model"),
                            ({"tokenizer": "0"}, "another base model"),
                            ({"options": {"n_head": 3}}, "doesn't fit"),
                            ({"counts": torch.ones(9)}, "doesn't fit"),  # of an earlier version
                            ({"heads": {}}, "doesn't fit")]:
        torch.save({**heads, **change}, tmp_path / "hydra.pt")
        refused(message)


def test_training_mistakes_write_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "short.txt").write_text("too short", "utf-8")
    (tmp_path / "empty.txt").write_text("", "utf-8")
    (tmp_path / "middle.txt").write_text("a = 1\n" * 99, "utf-8")
    (tmp_path / "long.txt").write_text("a = 1\nb = 2\n" * 3000, "utf-8")
    (tmp_path / "latin.txt").write_bytes("Müßiggang".encode("latin-1") * 999)
    (tmp_path / "folder").mkdir()
    for data, message, *more in [
            ("absent", "there is no such file"), ("short.txt", "give a text of"),
            ("empty.txt", "give a text of"), ("middle.txt", "give a text of"),
            ("latin.txt", "latin.txt isn't UTF-8"), ("folder", "give a text of"),
            ("x" * 999, "can't be read"), ("long.txt", "n_embd=30", "--n-embd", "30"),
            ("long.txt", "10 isn't a number from 257 to", "--vocab-size", "10"),
            ("long.txt", "can't be written", "--out", tmp_path / "long.txt")]:
        code = run(monkeypatch, train, "--data", tmp_path / data, "--out", tmp_path / "out", *TINY,
                   *more)
        got = capsys.readouterr()
        assert code == 2 and message in got.err and got.err.count("\n") == 1, (data, got.err)
    assert not (tmp_path / "out").exists()


def test_odd_sizes_and_one_line_of_text(tmp_path, monkeypatch, capsys):
    """A text without a line break has no standard prompts; windows longer than the context."""
    (tmp_path / "line.txt").write_text("a = 1; b = 2; " * 3000, "utf-8")
    assert run(monkeypatch, train, "--data", tmp_path / "line.txt", "--out", tmp_path / "out",
               *TINY, "--block-size", "32", "--length", "64") == 0
    assert run(monkeypatch, hydra, "--prompt", "a", "--out", tmp_path / "out") == 0


def test_resume_keeps_the_base_model(out, tmp_path, monkeypatch, capsys):
    (tmp_path / "base.pt").write_bytes((out / "base.pt").read_bytes())
    data = out.parent / "data.txt"
    assert run(monkeypatch, train, "--data", data, "--out", tmp_path, "--resume",
               *TINY) == 0
    assert (tmp_path / "base.pt").read_bytes() == (out / "base.pt").read_bytes()
    assert run(monkeypatch, hydra, "--prompt", "x", "--out", tmp_path, "--heads", "medusa") == 0


def test_folders_are_read_in_order_and_without_links(tmp_path, capsys):
    for name, text in [("b.txt", "second"), ("a/a.txt", "first"), (".hidden/x.txt", "no")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert train.read_corpus(tmp_path) == ["first", "second"]
    assert "1 files that are no UTF-8 skipped" in capsys.readouterr().out


def test_hold_out_is_a_fixed_tenth():
    texts = [str(i) for i in range(25)]
    assert train.hold_out(texts) == ([t for t in texts if t not in ("9", "19")], ["9", "19"])
    assert train.hold_out(["abcde", "fghij"]) == (["abcdefghi"], ["j"])
    assert train.hold_out(texts, 20)[1] == ["19"]  # files stay whole: each ends with a stop token
    assert train.hold_out(texts, 5)[1] == ["4", "9", "14", "19", "24"]


def test_plain_process_ascii_pipe_and_empty_home(out, tmp_path):
    """As a user runs it: no home, an ASCII terminal, output cut off by `head`."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONIOENCODING": "ascii",
                   "PYTHONUTF8": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "hydra.py"), "--prompt", "é漢\udc80", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    pipe = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)
    pipe.stdout.close()
    assert b"Traceback" not in pipe.stderr.read() and pipe.wait() == 0
    pipe.stderr.close()


def test_bench_prints_its_table_and_one_json_object(out, monkeypatch, capsys):
    assert run(monkeypatch, bench, "--quick", "--out", out, "--prompts", "2") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) >= {"config", "versions", "threads", "step_cost", "methods", "sampled"}
    for methods in (result["methods"], *result["sampled"].values()):
        assert list(methods) == ["none", "lookup", *(name for kind in hydra.KINDS for name in
                                                     (kind, f"{kind} trim"))]
        for name, row in methods.items():
            assert row["identical"] and (name != "none" or row["tokens_per_step"] == 1)
            assert row["mbsu"] <= row["tokens_per_step"]
            counts = row["accepted_drafts"]
            assert sum((m + 1) * n for m, n in enumerate(counts)) / sum(counts) == pytest.approx(
                row["tokens_per_step"])
            assert row["ms"]["base"] > 0 and (row["ms"]["draft"] > 0) == (row["tree_nodes"] > 1)
    assert 0 < result["roofline"] and 0.5 < result["against_hand_written"] < 2
    assert run(monkeypatch, bench, "tree", "--quick", "--out", out, "--prompts", "2") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == set(hydra.KINDS) and set(result["hydra"]) == {"0.0", "0.8"}
    assert all(row["identical"] for row in result["hydra"]["0.8"].values())
    assert run(monkeypatch, bench, "trim", "--quick", "--out", out, "--prompts", "2") == 2
    assert "2 standard prompts are too few, 4 are needed" in sentence(capsys)
    assert run(monkeypatch, bench, "--out", out, "--tree", "[[9999]]") == 2
    assert "path [9999]" in sentence(capsys)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch, bench, "--out", out, "--plot", "x.png") == 2
    assert "matplotlib, which isn't installed" in sentence(capsys)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    for path, message in [("x.gif", "has to end in .png"), ("absent/x.png", "can't be written")]:
        assert run(monkeypatch, bench, "--out", out, "--plot", path) == 2
        assert message in sentence(capsys)


def test_bench_heads_can_be_resumed(out, tmp_path, monkeypatch, capsys):
    """Two rows of the table; what is done isn't done again, unless the base model is another."""
    (tmp_path / "base.pt").write_bytes((out / "base.pt").read_bytes())
    monkeypatch.setattr(bench, "ROWS", {name: bench.ROWS[name] for name in ("medusa", "hydra")})
    monkeypatch.setattr(bench, "QUICK", (0.5, 4))
    call = (monkeypatch, bench, "heads", "--quick", "--out", tmp_path, "--prompts", "2", "--data",
            out.parent / "data.txt")
    assert run(*call) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [key.split(" same")[0].strip() for key in first] == 2 * ["medusa"] + 2 * ["hydra"]
    trained = []
    monkeypatch.setattr(bench, "train_heads", lambda *args: trained.append(args))
    assert run(*call) == 0 and not trained
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    torch.save({key: {**row, "bound": "0"} for key, row in first.items()},
               tmp_path / "ablation.pt")
    assert run(*call) == 0 and len(trained) == 4


def test_compiling_works_or_says_why_not(out, monkeypatch, capsys):
    model, *_ = hydra.load_base(out)
    tokens, eager = torch.tensor([[1, 2, 3]]), model.forward
    before = model(tokens)

    def broken(function):
        raise RuntimeError("no compiler")
    monkeypatch.setattr(torch, "compile", broken)
    measure.compile_forward(model)
    assert "torch.compile doesn't work here (RuntimeError)" in sentence(capsys)
    assert torch.equal(model(tokens), before)
    monkeypatch.setattr(torch, "compile", lambda function: lambda *args: eager(*args) + 1)
    measure.compile_forward(model)
    assert torch.equal(model(tokens), before + 1)


def test_the_house_stays_small():
    """Line budgets; no function over 60 lines; no line over 100 columns."""
    for path in ROOT.glob("*.py"):
        text = path.read_text("utf-8")
        assert text.count("\n") <= BUDGET[path.stem], path.name
        assert max(map(len, text.splitlines())) <= 100, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path.name, node.name)
