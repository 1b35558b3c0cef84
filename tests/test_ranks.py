"""Several processes that hold one model: on a CPU, over loopback, with MLX's ring.

Starting one costs seconds, so each start serves many checks. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ds4cli.errors import RankError, UsageError
from ds4cli.models import sharding
from ds4cli.ranks import launch, wire
from ds4cli.ranks.group import Leading

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
        process.communicate()


def walks(ranks: int, folder: Path, cases: list[str]) -> list[dict]:
    run = done(sys.executable, RUN, ranks, folder, *cases)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [f["case"] for f in found] == cases, run.stderr[-2000:]
    return found


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
def test_a_shared_model_says_what_the_whole_one_says(cases, tmp_path):
    """Guards: replies, drafts of a model and of heads, repairs of calls and forms, rewinds in and
    beyond the horizon, forks and files that differ from one process's."""
    for found in walks(2, tmp_path, cases):
        assert found["text"] == "equal" and found["logits"] <= CLOSE, found
        kind = found["case"].rpartition("+")[2]
        assert kind not in HEADS or found["proposed"][kind] > 20, found
        assert kind != "calls" or found["repairs"] > 5, found
    assert list(tmp_path.glob("state*.rank1"))  # each rank has its part


@pytest.mark.slow
def test_four_ranks_and_quantised_caches(tmp_path):
    """Guards: what holds for two ranks only; a KV cache of few bits that ranks cut otherwise."""
    cases = ["wide+tensor_parallel", "deepseek_v3+tensor_parallel", "wide+tensor_parallel+kv"]
    for found in walks(4, tmp_path, cases):
        close = 1e-2 if "kv" in found["case"] else CLOSE
        assert found["text"] == "equal" and found["logits"] <= close, found


def test_a_launcher_starts_the_command(model_folder):
    """Guards: `mlx.launch` hangs because it holds standard input open, or both ranks print."""
    words = ["generate", "-m", model_folder, "-n", 20, "--json", "Hello"]
    alone = json.loads(done(*COMMAND, *words).stdout)
    port = launch._free_ports(1)[0]
    two = [LAUNCH, "-n", 2, "-p", port, "--"]
    with started(*two, *COMMAND, *words, stdin=subprocess.PIPE) as launched:
        threading.Timer(LIMIT_S, launched.kill).start()
        found = json.loads(launched.stdout.read())
    assert (found["text"], found["usage"]) == (alone["text"], alone["usage"])


def test_a_chat_goes_back_on_all_ranks(model_folder, tmp_path):
    """Guards: undo, edit and retry that leave the others in another text."""
    said = "One\nTwo\n/undo\nThree\n/retry\n/edit 1 Four\n/turns\n"
    (tmp_path / "said").write_text(said)
    words = ["chat", "-m", model_folder, "-n", 12, "--seed", 5, "--no-save"]
    outs = []
    for more in ([], ["--local-ranks", 2]):
        with open(tmp_path / "said") as stdin:
            run = done(*COMMAND, *words, *more, stdin=stdin)
        assert run.returncode == 0, run.stderr
        outs.append(run.stdout)
    assert outs[0] and outs[0] == outs[1]


def lines(count: int) -> str:
    """Requests of all kinds, one of them bad."""
    told = [{"prompt": f"Line {i} of many", "max_tokens": 4 + i % 9} for i in range(count)]
    told[1] |= {"n": 3, "temperature": 1.0}
    told[2] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
    told[3] = {"prompt": 5}
    told[4] |= {"response_format": {"type": "json_object"}}
    return "".join(json.dumps(line) + "\n" for line in told)


def test_ranks_answer_lines_as_one_does(model_folder, tmp_path):
    """Guards: output in another order or of other bytes; a line that is lost with its rank, or
    answered twice."""
    (tmp_path / "in").write_text(lines(60))
    words = ["generate", "-m", model_folder, "--batch", "in", "--dtype", "float32", "-o"]
    shared = ["--data-parallel", "--local-ranks", 2]
    alone = done(*COMMAND, *words, "alone")
    assert alone.returncode == 1, alone.stderr  # the bad line
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
    assert int(re.search(r"other ranks answered (\d+)", again.stderr)[1]) > 0


def others(process) -> list[int]:
    """The processes that it has started; waits until there is one."""
    while True:
        run = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
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
        limit = time.monotonic() + 20
        while process.poll() is None or any(map(is_running, followers)):
            assert time.monotonic() < limit, f"{victim}, {number}, {wait_s}: still there"
            time.sleep(0.05)
        return process.stderr.read().decode()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("wait_s", [None, 0.2])
def test_a_lost_rank_ends_all_with_a_line(model_folder, wait_s):
    """Guards: the others wait for ever in a sum with a rank that is gone."""
    assert "rank 1 (127.0.0.1): it has ended (SIGKILL)" in lost(
        model_folder, "rank 1", signal.SIGKILL, wait_s
    )
    lost(model_folder, "rank 0", signal.SIGKILL, wait_s)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_ranks_lost_at_any_moment(model_folder):
    """Guards: a moment of meeting, loading or decoding at which a lost rank leaves others."""
    for trial in range(20):
        victim, number = f"rank {trial % 2}", (signal.SIGKILL, signal.SIGTERM)[trial // 2 % 2]
        said = lost(model_folder, victim, number, trial * 0.25)
        assert victim == "rank 0" or "rank 1" in said, (trial, said)


def test_what_no_rank_can_do_is_said_once(model_folder):
    """Guards: each rank complains, and the hint is lost."""
    words = ["generate", "-m", model_folder, "--pipeline", "--local-ranks", 2, "Hello"]
    run = done(*COMMAND, *words)
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert "`--tensor-parallel` works" in run.stderr


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


def test_heads_are_not_cut_in_two():
    """Guards: mlx-lm goes on with heads of another size, and the text is nonsense."""
    config = {"num_attention_heads": 6, "num_key_value_heads": 2}
    sharding._check_heads(config, 2, "m")
    with pytest.raises(UsageError, match="num_attention_heads is 6"):
        sharding._check_heads(config, 4, "m")
    with pytest.raises(UsageError, match="num_key_value_heads is 2"):
        sharding._check_heads(config, 3, "m")


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


def test_a_rank_elsewhere_is_started_as_here(tmp_path):
    """Guards: a command for ssh that a shell reads otherwise than it was meant."""
    place = launch.Place("mac2", variables={"MLX_RANK": "1", "A": "b 'c'"}, files={"F": '[["x"]]'})
    script = launch._by_ssh(place)[-1].replace(sys.executable, "env #", 1)
    found = done("sh", "-c", script).stdout.splitlines()
    assert "A=b 'c'" in found and "MLX_RANK=1" in found
    name = next(line[2:] for line in found if line.startswith("F="))
    assert Path(name).read_text() == '[["x"]]'
