"""Several processes that hold one model: on a CPU, over loopback, with MLX's ring.

Starting one costs seconds, so each start serves many checks. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ds4cli import Engine, signals
from ds4cli.cli import app
from ds4cli.errors import RankError, UsageError
from ds4cli.ranks import follower, launch, wire
from ds4cli.ranks import group as groups
from ds4cli.ranks.group import BEAT, END, Leading
from ds4cli.ranks.timelines import part_of

COMMAND = [sys.executable, "-m", "ds4cli"]
LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
ENDLESS = ["-n", "-1", "--logit-bias", "258=-1000"]
RUN = str(Path(__file__).with_name("rank_run.py"))
LIMIT_S = 240  # of a run that does not hang; a machine that is busy may take that long
CLOSE = 2e-5
CASES = [
    "llama+tensor_parallel+calls",
    "windows+tensor_parallel+draft",
    "qwen3_5+tensor_parallel+mtp",
    "deepseek_v3+pipeline",
]
MORE_CASES = [
    "qwen3_5+pipeline+mtp",
    "qwen3_5+tensor_parallel+dspark",
    "llama+tensor_parallel+adapter",
    "llama+tensor_parallel",
]
FOUR = [
    "wide+tensor_parallel",
    "wide_windows+tensor_parallel",
    "deepseek_v3+tensor_parallel",
    "wide+tensor_parallel+kv",
]
HEADS = "mtp", "dspark"


def done(*words, **how):
    """A finished process, its output as text."""
    how = {"stdin": subprocess.DEVNULL, **how}
    return subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=LIMIT_S, check=False, **how
    )


@contextlib.contextmanager
def started(*words, **how):
    """A process, ended at the end."""
    process = subprocess.Popen(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def with_ranks(ranks: int, folder: Path, cases: list[str], steps: int = 7) -> list[dict]:
    """What `rank_run.py` says."""
    run = done(sys.executable, RUN, ranks, folder, steps, *cases)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [f["case"] for f in found] == cases, run.stderr[-2000:]
    return found


def check_walks(found: list[dict]) -> None:
    for each in found:
        kind = each["case"].rpartition("+")[2]
        close = 1e-2 if kind == "kv" else CLOSE
        assert each["text"] == "equal" and each["logits"] <= close, each
        assert kind not in HEADS or each["proposed"][kind] > 10, each
        assert kind != "calls" or each["repairs"] > 3, each


def test_ranks_say_what_one_process_says(model_folder, tmp_path):
    """Guards: replies, drafts of a model and of heads, repairs of calls and forms, rewinds in and
    beyond the horizon, forks, files, undo, edit and retry in a chat, lines of a batch that differ
    from one process's."""
    (tmp_path / "in").write_text(lines(16))
    said = "One\nTwo\n/undo\nThree\n/retry\n/edit 1 Four\n/turns\n"
    model = ["-m", str(model_folder), "--dtype", "float32"]
    chat = [said, "chat", *model, "--speculate", "always", "-n", "8", "--seed", "5", "--no-save"]
    batch = ["", "generate", *model, "--batch", str(tmp_path / "in"), "-o"]
    two = ["--local-ranks", "2"]
    commands = [[*chat, *two], [*batch, str(tmp_path / "shared"), "--data-parallel", *two]]
    cases = [*CASES, "messages", *map(json.dumps, commands)]
    *walks, told, talk, answers = with_ranks(2, tmp_path, cases)
    check_walks(walks)
    for kind, most in (("plain", 64), ("drafted", 128)):  # a message a step, of so many bytes
        assert told[kind][0] <= 1.3 and told[kind][1] <= most, told
    assert list(tmp_path.glob("state*.rank1"))  # each rank has its part
    assert talk["said"] and talk["said"] == alone(*chat).stdout, talk
    assert answers["code"] == alone(*batch, str(tmp_path / "alone")).exit_code == 1  # the bad line
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "alone").read_bytes()
    assert int(re.search(r"other ranks answered (\d+)", answers["errors"])[1]) > 0


def alone(said: str, *words: str):
    """A command in this process."""
    return CliRunner().invoke(app, words, input=said)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, MORE_CASES + CASES), (4, FOUR)])
def test_more_models_and_four_ranks(ranks, cases, tmp_path):
    """Guards: what holds for two ranks only; a KV cache of few bits that ranks cut otherwise."""
    check_walks(with_ranks(ranks, tmp_path, cases, steps=20))


def test_ranks_of_a_launcher(model_folder, tmp_path):
    """Guards: a rank waits for the end of standard input, which launchers hold open; both print;
    Ctrl-C loses what was said, or leaves a rank behind."""
    words = ["generate", "-m", str(model_folder), *ENDLESS, "Hello"]
    ports = launch._free_ports(2)
    (tmp_path / "hosts").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ranks = [
        {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(tmp_path / "hosts")}
        for rank in range(2)
    ]
    how = {"stdin": subprocess.PIPE}
    with (
        started(*COMMAND, *words, env=ranks[0], **how) as first,
        started(*COMMAND, *words, env=ranks[1], **how) as second,
    ):
        said = first.stdout.read(20)
        first.send_signal(signal.SIGINT)
        said += first.stdout.read()
        assert first.wait(20) == 130, first.stderr.read()
        assert second.wait(20) == 0 and not second.stdout.read()
    more = alone("", *words[:3], "-n", "40", *ENDLESS[2:], "Hello").stdout.encode()
    assert said.startswith(more[:20]) and said.endswith(b"\n")


@pytest.mark.slow
def test_a_launcher_starts_the_command(model_folder):
    """Guards: MLX's own launcher does something else than we think."""
    words = ["generate", "-m", str(model_folder), "-n", "20", "--json", "Hello"]
    one = json.loads(alone("", *words).stdout)
    port = launch._free_ports(1)[0]
    two = [LAUNCH, "-n", 2, "-p", port, "--"]
    with started(*two, *COMMAND, *words, stdin=subprocess.PIPE) as launched:
        threading.Timer(LIMIT_S, launched.kill).start()
        found = json.loads(launched.stdout.read())
    assert (found["text"], found["usage"]) == (one["text"], one["usage"])


def lines(count: int) -> str:
    """Requests of all kinds, one of them bad."""
    told = [{"prompt": f"Line {i} of many", "max_tokens": 4 + i % 9} for i in range(count)]
    told[1] |= {"n": 3, "temperature": 1.0}
    told[2] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
    told[3] = {"prompt": 5}
    told[4] |= {"response_format": {"type": "json_object"}}
    return "".join(json.dumps(line) + "\n" for line in told)


@pytest.mark.slow
def test_a_batch_loses_nothing_with_a_rank(model_folder, tmp_path):
    """Guards: a line that is lost with its rank, or answered twice."""
    (tmp_path / "in").write_text(lines(60))
    words = ["generate", "-m", model_folder, "--batch", "in", "--dtype", "float32", "-o"]
    shared = ["--data-parallel", "--local-ranks", 2]
    assert done(*COMMAND, *words, "alone").returncode == 1  # the bad line
    output = tmp_path / "shared"
    with started(*COMMAND, *words, output, *shared, stdin=subprocess.DEVNULL) as process:
        follower = others(process)[0]
        while not output.exists() or not output.stat().st_size:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(20) == 1 and b"rank 1" in process.stderr.read()
    wanted, kept = (tmp_path / "alone").read_bytes(), output.read_bytes()
    assert kept and wanted.startswith(kept[: kept.rindex(b"\n") + 1]) and kept != wanted
    again = done(*COMMAND, *words, output, *shared, "--resume")
    assert output.read_bytes() == wanted, again.stderr


def others(process) -> list[int]:
    """The processes that it has started; waits until there is one."""
    while True:
        run = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, timeout=300
        )
        if run.stdout.split():
            return [int(pid) for pid in run.stdout.split()]
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def lost(folder: Path, victim: str, number: int, wait_s: float | None) -> str:
    """Signal rank 0, or another, when it speaks or `wait_s` after it was started; what is said.
    Nobody is left."""
    words = ["generate", "-m", folder, *ENDLESS, "--local-ranks", 2, "Hello"]
    with started(*COMMAND, *words, stdin=subprocess.DEVNULL) as process:
        followers = others(process)
        process.stdout.read(20) if wait_s is None else time.sleep(wait_s)
        os.kill(process.pid if victim == "rank 0" else followers[0], number)
        limit = time.monotonic() + 40
        while process.poll() is None or any(map(is_running, followers)):
            assert time.monotonic() < limit, f"{victim}, {number}, {wait_s}: still there"
            time.sleep(0.05)
        return process.stderr.read().decode()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_lost_rank_ends_all_with_a_line(model_folder):
    """Guards: the others wait for ever in a sum with a rank that is gone."""
    said = lost(model_folder, "rank 1", signal.SIGKILL, None)
    assert "rank 1 (127.0.0.1): it has ended (SIGKILL)" in said


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_ranks_lost_at_any_moment(model_folder, victim):
    """Guards: a moment of meeting, loading or decoding at which a lost rank leaves others."""
    for trial in range(20):
        number = (signal.SIGKILL, signal.SIGTERM)[trial % 2]
        said = lost(model_folder, victim, number, trial * 0.25)
        assert victim == "rank 0" or "rank 1" in said, (trial, said)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_stopped_rank_ends_all(model_folder):
    """Guards: rank 0 waits for ever for a process that is there and does nothing."""
    said = lost(model_folder, "rank 1", signal.SIGSTOP, None)
    assert "rank 1 (127.0.0.1): it has said nothing for 15 s" in said


@pytest.mark.slow
def test_what_no_rank_can_do_is_said_once(model_folder):
    """Guards: each rank complains, and the hint is lost."""
    words = ["generate", "-m", model_folder, "--pipeline", "--local-ranks", 2, "Hello"]
    run = done(*COMMAND, *words)
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert "`--tensor-parallel` works" in run.stderr


@pytest.mark.slow
def test_an_interrupt_stops_the_reply_everywhere(model_folder):
    """Guards: Ctrl-C loses what was said, or leaves a rank behind."""
    words = ["generate", "-m", model_folder, *ENDLESS, "--local-ranks", 2, "Hello"]
    with started(*COMMAND, *words, stdin=subprocess.DEVNULL) as process:
        follower = others(process)[0]
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=20)
        assert process.returncode == 130 and (begun + said).endswith(b"\n"), errors
        assert not is_running(follower)


# --- the parts ----------------------------------------------------------------------------------


class Comm:
    """MLX's group, of two."""

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.fixture
def pair():
    """Rank 0's group, and the ends of the other rank: moves and life."""
    wires = []
    for _ in range(2):
        server = wire.listen([wire.LOOPBACK])
        there = wire.connect([wire.LOOPBACK], server.getsockname()[1])
        wires.append((wire.accept(server), there))
        server.close()
    (moves, far_moves), (life, far_life) = wires
    group = Leading(Comm(), {1: moves}, {1: life})
    yield group, far_moves, far_life
    group.leave()
    for each in (far_moves, far_life):
        each.close()
    group.watch.join(5)
    for each in (moves, life):
        each.close()


class Clock:
    """Time that a test sets. asked: how often."""

    now, asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return self.now

    def rounds(self, count: int) -> None:
        """Wait until a thread has looked at it so often; 5 s at most."""
        until = self.asked + count
        for _ in range(5000):
            if self.asked >= until:
                return
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(groups, "time", made)
    monkeypatch.setattr(groups, "BEAT_S", 0.01)
    return made


def test_a_silent_rank_is_lost(monkeypatch, clock, request):
    """Guards: a process that is stopped, or hangs, is waited for for ever; one that is in a long
    call, and says that it runs, is lost."""
    said: list[str] = []

    def fail_now(message: str) -> None:
        said.append(message)
        group.leave()

    monkeypatch.setattr(signals, "fail_now", fail_now)
    group, _, life = request.getfixturevalue("pair")
    for now in (14.0, 28.0):
        clock.now = now
        life.send(BEAT, BEAT)
        clock.rounds(6)
    clock.now = 42.0
    clock.rounds(6)
    assert group.watch.is_alive() and not said
    clock.now = 44.0
    for _ in range(20_000):
        if said or not group.watch.is_alive():
            break
        time.sleep(0.001)
    assert said == ["rank 1 (127.0.0.1): it has said nothing for 15 s"]


def test_rank_0_that_was_stopped_goes_on(monkeypatch, clock, request):
    """Guards: Ctrl-Z and `fg` in a chat: the ranks that spoke meanwhile are taken for lost."""
    said, stops, ends = [], threading.Event(), []

    class Stopped(selectors.DefaultSelector):
        def select(self, timeout=None):
            if not stops.is_set():
                return super().select(timeout)
            stops.clear()
            ends[0].send(BEAT)
            clock.now += 100.0
            return []

    monkeypatch.setattr(selectors, "DefaultSelector", Stopped)
    monkeypatch.setattr(signals, "fail_now", said.append)
    group, _, life = request.getfixturevalue("pair")
    ends.append(life)
    stops.set()
    clock.rounds(10)
    assert clock.now == 100.0 and not said and group.watch.is_alive()


class Script:
    """A following rank's group that is told what a test says."""

    rank = 1

    def __init__(self, *moves):
        self.moves = [*moves, [END]]

    def next(self):
        return self.moves.pop(0)


def test_a_part_is_renamed_with_its_session(tmp_path):
    """Guards: a chat that got a name, and whose kept state other ranks do not find any more."""
    told = []
    owner = SimpleNamespace(_group=SimpleNamespace(rename=lambda *names: told.append(names)))
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("0")
    part_of(str(old), 1).write_text("1")
    Engine.rename_session(owner, old, new)
    follower.follow(Script(*[["rename", *names] for names in told]), {})
    assert new.read_text() == "0" and part_of(str(new), 1).read_text() == "1"
    follower.follow(Script(["rename", str(old), str(new)]), {})  # it kept none
    assert sorted(path.name for path in tmp_path.glob("[on]*")) == ["new", "new.rank1"]


FACTS = {"model": "abc", "versions": ["ds4cli 1", "mlx 2"]}


@pytest.mark.parametrize(
    ("name", "value"), [("model", "other"), ("versions", ["ds4cli 1", "mlx 3"])]
)
def test_ranks_that_differ_are_told(pair, name, value):
    """Guards: parts of two models, or of two versions, computed together."""
    group, moves, _ = pair
    moves.send(FACTS)
    group.check(FACTS)
    moves.send({**FACTS, name: value})
    with pytest.raises(RankError, match=f"rank 1 .* differ in {name}"):
        group.check(FACTS)


def test_moves_wait_for_each_other_in_order(pair):
    """Guards: a move that is lost, overtaken, or sent before it has to be."""
    group, moves, _ = pair
    group.tell("feed", 1, [2, 3], True, 0)
    waiting = select.poll()
    waiting.register(moves, select.POLLIN)
    assert not waiting.poll(0)
    group.tell("evaluate", 1)
    group.flush()
    assert [moves.receive(), moves.receive()] == [["feed", 1, [2, 3], True, 0], ["evaluate", 1]]


def test_host_files_are_read_as_mlx_reads_them(tmp_path):
    """Guards: a rank that is told another place than MLX's launcher would tell it."""
    path = tmp_path / "hosts.json"
    hosts = [{"ssh": f"mac{i}", "ips": [f"10.0.0.{i}"], "rdma": [None, "rdma_en2"]} for i in (1, 2)]
    path.write_text(json.dumps({"backend": "ring", "envs": ["A=b=c"], "hosts": hosts}))
    places = launch.listed(str(path))
    assert [place.host for place in places] == ["mac1", "mac2"]
    assert places[1].variables == {"MLX_RANK": "1", "A": "b=c"}
    ring = json.loads(places[0].files["MLX_HOSTFILE"])
    assert ring == [["10.0.0.1:32323"], ["10.0.0.2:32324"]] and places[1].files == places[0].files
    path.write_text(json.dumps({"backend": "jaccl", "hosts": hosts}))
    jaccl = launch.listed(str(path))[1]
    assert jaccl.variables["MLX_JACCL_COORDINATOR"] == "10.0.0.1:32323"
    assert json.loads(jaccl.files["MLX_IBV_DEVICES"])[0] == [None, "rdma_en2"]
    path.write_text("[]")
    with pytest.raises(UsageError, match="two hosts"):
        launch.listed(str(path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 3},
        [{"ssh": "a", "ips": "10.0.0.1"}] * 2,
        [{"ssh": 7, "ips": ["10.0.0.1"]}] * 2,
        [{"ssh": "a", "ips": [1]}] * 2,
        {"hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}] * 2, "envs": ["A B=1"]},
        {"hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}] * 2, "envs": ["A"]},
    ],
)
def test_a_host_file_that_makes_no_sense(tmp_path, wrong):
    """Guards: a traceback, or addresses made of single letters."""
    (tmp_path / "hosts").write_text(json.dumps(wrong))
    with pytest.raises(UsageError, match="cannot read the host file"):
        launch.listed(str(tmp_path / "hosts"))


def test_ssh_that_fails_says_why(tmp_path, monkeypatch):
    """Guards: `exit code 255`, and nothing else, for a host that is switched off."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: mac2 is not known' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rank = launch.Follower(launch.Place("mac2"), str(tmp_path))
    assert rank.epitaph() == "ssh does not reach it, or lost it: ssh: mac2 is not known"
    for stream in (rank._process.stdin, rank._process.stdout):
        stream.close()


def test_a_rank_elsewhere_is_started_as_here(tmp_path):
    """Guards: a command for ssh that a shell reads otherwise than it was meant."""
    place = launch.Place("mac2", variables={"MLX_RANK": "1", "A": "b 'c'"}, files={"F": '[["x"]]'})
    script = launch._by_ssh(place)[-1].replace(sys.executable, "env #", 1)
    found = done("sh", "-c", script).stdout.splitlines()
    assert "A=b 'c'" in found and "MLX_RANK=1" in found
    name = next(line[2:] for line in found if line.startswith("F="))
    assert Path(name).read_text() == '[["x"]]'
