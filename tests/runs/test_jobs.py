"""A run with several worker processes gives the results of a sequential one, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import torch
from image_folders import write_images
from json_pages import schema
from kfacpack_cli.console import StageRows
from kit import refused
from processes import Python

import kfacpack as kp
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.resume import Interrupted
from kfacpack.experiments import jobs
from kfacpack.experiments.jobs import JobsWarning, Scheduler, StageWorker, WorkerPool, critical_paths, worker_devices
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.results import RESULTS, RunRecord, StageEvent, open_events
from kfacpack.experiments.run import Run, RunContext, _exclusive_lock
from kfacpack.experiments.worker import compute

TEXT = """\
name: short
model: {name: tiny, head: text}
tasks: [faces, weaves]
curvature: {examples: 4, batch_size: 4}
training: {steps: 2, batch_size: 4}
arms:
  without: {penalty: none}
  kfac: {penalty: kronecker, strength: 3}
evaluation:
  examples: 8
  alphas: "0,1"
"""


def run_of(root, jobs=1, **options):
    return Run(parse(TEXT, "plan"), TEXT, root, torch.device("cpu"), jobs, **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The results of a sequential run."""
    root = tmp_path_factory.mktemp("sequential")
    run_of(root).execute()
    return (root / RESULTS).read_bytes()


def test_image_files_are_decoded_in_processes_that_a_worker_forks(tmp_path):
    """A thread of the worker reads its input. Forked processes close their stdin, which must not block."""
    write_images(tmp_path / "mine", {split: {"red": 6, "blue": 6} for split in ("train", "validation", "test")})
    plan = TEXT.replace("weaves]", "{name: mine, data: mine}]")
    (tmp_path / "plan.yaml").write_text(plan)
    with Python("-m", "kfacpack_cli", "run", tmp_path / "plan.yaml", "-o", tmp_path / "out", "--jobs", 2) as process:
        result = process.wait(240)
    assert result.returncode == 0, result.stderr
    assert any(stage.startswith("vectors/mine") for stage in finished_in(tmp_path / "out"))


def events_of(root):
    lines = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    for line in lines:
        jsonschema.validate(line, schema(StageEvent))
    return lines


def finished_in(root):
    return [event["stage"] for event in events_of(root) if event["event"] == "finished"]


class LocalWorker(StageWorker):
    """Computes its stage in this process."""

    def __init__(self, number):
        super().__init__(number, "cpu", Path(f"worker-{number}.log"))

    def start(self, stage):
        pass

    def stop(self):
        pass


class LocalPool(WorkerPool):
    """Two workers that take turns. They compute merged bundles alone, and report all other stages as finished.

    `accidents` replaces the messages of stages, by kind.
    """

    def __init__(self, accidents):
        self.workers = [LocalWorker(1), LocalWorker(2)]
        self.replaced = []
        self._accidents = accidents

    workers = None

    def messages(self, seconds):
        worker = next(worker for worker in self.workers if worker.stage)
        accidents = self._accidents.get(worker.stage.kind)
        if accidents:
            return [(worker, accidents.pop(0))]
        if worker.stage.kind == "merged":
            return [(worker, compute(worker.stage, lambda *_: None, lambda: False, print))]
        return [(worker, {"event": "finished", "seconds": 0.0, "peak_bytes": 0})]

    def replace(self, worker):
        self.replaced.append(worker.number)

    def close(self):
        pass


LOST = {"event": "lost", "reason": "was killed by signal 9"}


class Record:
    """Stage displays, and whether each ended as finished."""

    def __init__(self):
        self.ends = []

    @contextmanager
    def __call__(self, stage, number, total):
        try:
            yield lambda done, total, status: None
        except BaseException as problem:
            self.ends.append((stage.kind, type(problem)))
            raise
        self.ends.append((stage.kind, None))


def schedule(root, **accidents):
    """Runs the plan in this process, with accidents by kind of stage; returns the pool, the displays and the events."""
    run, pool, show, events = run_of(root), LocalPool(accidents), Record(), []
    for kind in {stage.kind for stage in run.stages}:
        (root / kind).mkdir(parents=True, exist_ok=True)
    with (root / "events.jsonl").open("a") as file:
        record = RunRecord(root, run.stages, file, events.append, lambda: 0)
        try:
            Scheduler(run.stages, pool, show, lambda: False, record).run()
        finally:
            events[:] = [event for event in events if event["event"] not in ("started", "finished")]
    return pool, show, events


@pytest.fixture
def without_merging(monkeypatch):
    monkeypatch.setattr("kfacpack.experiments.artifact_stages.MergeStage.make", lambda self, monitor: None)


@pytest.mark.usefixtures("without_merging")
def test_a_lost_stage_is_computed_once_more(tmp_path):
    pool, show, events = schedule(tmp_path, merged=[dict(LOST)])
    assert pool.replaced == [1]
    assert [(event["event"], event["stage"].partition("/")[0]) for event in events] == [("retried", "merged")]
    assert events[0]["error"] == LOST["reason"]
    stages = len(run_of(tmp_path).stages)
    assert [kind for kind, problem in show.ends if problem] == ["merged"]
    assert len(show.ends) == stages + 1
    assert len(finished_in(tmp_path)) == len(set(finished_in(tmp_path))) == stages


@pytest.mark.usefixtures("without_merging")
def test_a_stage_that_is_lost_twice_ends_the_run(tmp_path):
    with refused(KfacpackError, "merged/", "worker-1.log", "signal 9", "--jobs"):
        schedule(tmp_path, merged=[dict(LOST), dict(LOST)])
    names = [event["event"] for event in events_of(tmp_path)]
    assert names.count("retried") == names.count("failed") == 1


@pytest.mark.parametrize("error", [KfacpackError("digits: no such thing"), OSError(28, "No space left", "x.kfac")])
def test_an_error_of_a_stage_is_that_of_a_sequential_run(tmp_path, monkeypatch, error):
    def raising(self, monitor):
        raise error

    monkeypatch.setattr("kfacpack.experiments.artifact_stages.MergeStage.make", raising)
    caught = []
    for number, execute in enumerate((lambda root: run_of(root).execute(), schedule)):
        with pytest.raises((KfacpackError, OSError)) as problem:
            execute(tmp_path / str(number))
        caught.append((type(problem.value), str(problem.value)))
        assert [event["event"] for event in events_of(tmp_path / str(number))].count("failed") == 1
    assert caught[0] == caught[1] == (type(error), str(error))


def test_an_error_of_the_program_names_the_stage_and_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("kfacpack.experiments.artifact_stages.MergeStage.make", lambda self, monitor: 1 / 0)
    with pytest.raises(RuntimeError, match=r"(?s)merged/.*worker-1\.log.*ZeroDivisionError: division by zero$"):
        schedule(tmp_path)


def test_the_display_counts_finished_stages_only():
    rows = StageRows({"a": 2.0, "b": 1.0}, 3, show=True)
    from kfacpack_cli.console import Progress

    rows._bars = Progress(disable=True)
    with rows:
        with pytest.raises(Interrupted), rows.row("stage", "a") as update:
            update(1, 2, "worker 1")
            assert rows._bars.tasks[0].completed == 1.0
            raise Interrupted
        assert rows._bars.tasks[0].completed == 0
        with rows.row("stage", "a"):
            pass
        assert rows._bars.tasks[0].completed == 2.0
        assert rows._bars.tasks[0].description == "2/3 stages"


def test_long_chains_are_started_first(tmp_path):
    run = run_of(tmp_path)
    lengths = critical_paths(run.stages)
    for stage in run.stages:
        assert all(lengths[dependency.key] >= lengths[stage.key] + dependency.cost() for dependency in stage.inputs)
    assert any(lengths[stage.key] == stage.cost() for stage in run.stages)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("parameters", "variable", "requested", "threads", "default"),
    [
        (1_000_000, None, None, 1, 8),
        (100_000_000, None, None, 4, 2),
        (2_000_000_000, None, None, 8, 1),
        (1_000_000, "2", None, 2, 4),
        (2_000_000_000, "2,1", None, 2, 4),
        (1_000_000, "many", None, 1, 8),
        (1_000_000, "2", 3, 3, 2),
    ],
)
def test_threads_depend_on_the_model_and_jobs_on_the_threads(
    monkeypatch, parameters, variable, requested, threads, default
):
    monkeypatch.setattr(distributed, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert distributed.stage_threads(CPU, parameters, requested) == threads
    assert distributed.default_jobs(CPU, threads) == default


def test_a_gpu_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(distributed, "usable_cores", lambda: 32)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert distributed.stage_threads(torch.device("cuda"), 10**9) == 8
    assert distributed.default_jobs(torch.device("cuda"), 8) == 4
    assert distributed.default_jobs(torch.device("cuda:1"), 8) == 1


def test_each_worker_sees_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    variables = [{"CUDA_VISIBLE_DEVICES": name} for name in ("0", "1")]
    assert worker_devices(torch.device("cuda"), {}) == [("cuda:0", variables[0]), ("cuda:1", variables[1])]
    assert worker_devices(torch.device("cuda:1"), {}) == [("cuda:1", variables[1])]
    selected = worker_devices(torch.device("cuda"), {"CUDA_VISIBLE_DEVICES": "5,GPU-8a"})
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in selected] == ["5", "GPU-8a"]
    assert worker_devices(CPU, {"CUDA_VISIBLE_DEVICES": "5"}) == [("cpu", {})]


def test_workers_share_the_memory_of_gpus(monkeypatch):
    free = {0: 100, 1: 1700}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu.index], 4000))
    assert distributed.workers_on_gpus(torch.device("cuda"), 100) == 1 + 2
    assert distributed.workers_on_gpus(torch.device("cuda:1"), 100) == 2


def test_memory_limits_the_number_of_jobs(monkeypatch):
    context = RunContext(parse(TEXT, "plan"), CPU)
    needed = distributed.worker_bytes(context.model_bytes)
    monkeypatch.setattr(jobs, "usable_cores", lambda: 64)
    for available, number in ((3 * needed, 3), (needed // 2, 1)):
        monkeypatch.setattr(jobs, "available_bytes", lambda available=available: available)
        with pytest.warns(JobsWarning, match=f"8 processes.* using {number} instead$"):
            assert jobs.choose_jobs(context, 8) == number
    monkeypatch.setattr(jobs, "available_bytes", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jobs.choose_jobs(context, 8) == 8
    monkeypatch.setattr(jobs, "usable_cores", lambda: 4)
    with pytest.warns(JobsWarning, match="cores: 4"):
        assert jobs.choose_jobs(context, 8) == 8


def test_the_number_of_threads_is_recorded_and_part_of_the_key(tmp_path):
    one, two = run_of(tmp_path), run_of(tmp_path, threads=2)
    assert one.graph.context.environment["threads"] == "1"
    assert two.graph.context.environment["threads"] == "2"
    assert {stage.key for stage in one.stages}.isdisjoint(stage.key for stage in two.stages)
    for options in ({"jobs": 0}, {"threads": -1}):
        with refused(KfacpackError, *options, "positive"):
            run_of(tmp_path, **options)


def test_an_event_that_a_full_disk_has_cut_off_is_removed(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n{"event": "fin')
    with open_events(tmp_path) as file:
        file.write('{"event": "started"}\n')
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "started"}\n' * 2


def workers_of(pid):
    """The processes whose parent is `pid`, before or after its death."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True).stdout
    return [int(child) for child, parent, _ in map(str.split, listed.splitlines()) if int(parent) == pid]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def command(tmp_path):
    """Returns a function that starts the plan with two workers, which are forked from the command."""
    (tmp_path / "plan.yaml").write_text(TEXT)

    def start(*options):
        return Python("-m", "forked_workers", "run", tmp_path / "plan.yaml", "-o", tmp_path / "out", *options)

    return start


def test_killed_processes_and_signals(expected, command, tmp_path):
    """A worker is killed; the command is terminated; the command is killed; the last call completes the run."""
    out = tmp_path / "out"
    with command("--jobs", 2, "-q") as process:
        wait_for(lambda: (out / "events.jsonl").exists() and "bundles/" in (out / "events.jsonl").read_text())
        victim = workers_of(process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: list(out.glob("vectors/*.safetensors")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60).returncode == 130
    assert [event["event"] for event in events_of(out)].count("retried") <= 1
    with command("--jobs", 2, "-q") as process:
        wait_for(lambda: list(out.glob("sums/*.safetensors")))
        children = workers_of(process.pid)
        assert len(children) == 2
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        wait_for(lambda: not any(map(is_running, children)), seconds=10)
    with command("--jobs", 2, "--json", "--events") as process:
        result = process.wait(120)
    assert result.returncode == 0, result.stderr
    assert (out / RESULTS).read_bytes() == expected
    assert json.loads(result.stdout) == json.loads(expected)
    names = finished_in(out)
    assert len(names) == len(set(names)), "nothing was computed twice"
    printed = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    assert printed == events_of(out)[-len(printed) :]
    assert {event["worker"] for event in printed} == {1, 2}


def test_a_full_disk_ends_the_run_and_a_second_run_continues(expected, command, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with command("--jobs", 2, "-q") as process:
        # Bundles and vectors are larger than 100 kB, scores are not.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, limit[1]))
        result = process.wait(60)
    assert result.returncode == 2
    assert "File too large" in result.stderr
    assert not list((tmp_path / "out").glob("bundles/*.kfac"))
    assert kp.run(tmp_path / "plan.yaml", tmp_path / "out") == json.loads(expected)


def test_two_runs_in_one_folder_are_refused(command, tmp_path):
    with _exclusive_lock(tmp_path / "out"), command("--jobs", 2, "-q") as process:
        result = process.wait(60)
    assert result.returncode == 2
    assert "another run" in result.stderr
    assert not list((tmp_path / "out").glob("*/*"))


def test_a_wrong_ray_cluster_is_reported(tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    with refused(KfacpackError, "--ray 127.0.0.1:1", "ray start --head"), run_of(tmp_path, ray="127.0.0.1:1") as run:
        run.execute()


def test_ray_without_an_address(tmp_path, monkeypatch):
    """A running cluster, that of RAY_ADDRESS, or else a new one, which is reported."""
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from kfacpack.experiments.ray_cluster import _connect

    calls = []

    def init(address, **options):
        calls.append(address)
        if address in missing:
            raise ConnectionError("no running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    missing = {"auto"}
    with pytest.warns(JobsWarning, match="on this machine"):
        _connect("auto")
    missing = {"local", "ray://head"}
    monkeypatch.setenv("RAY_ADDRESS", "ray://head")
    with refused(KfacpackError, "--ray ray://head"):
        _connect("auto")
    missing = set()
    _connect("auto")
    monkeypatch.delenv("RAY_ADDRESS")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _connect("auto")
    assert calls == ["auto", "local", "ray://head", "ray://head", "auto"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], None),
        (["--ray"], "auto"),
        (["--ray", "--quiet"], "auto"),
        (["--ray", "10.0.0.7:6379"], "10.0.0.7:6379"),
        (["--ray=local"], "local"),
    ],
)
def test_the_address_of_ray_is_optional(tmp_path, monkeypatch, options, expected):
    from kfacpack_cli import experiments
    from kfacpack_cli.main import app
    from typer.testing import CliRunner

    (tmp_path / "plan.yaml").write_text(TEXT)
    executed = []
    monkeypatch.setattr(experiments, "execute_run", lambda plan, text, root, options: executed.append(options.ray))
    for arguments in ([str(tmp_path / "plan.yaml"), *options], [*options, str(tmp_path / "plan.yaml")]):
        result = CliRunner().invoke(app, ["run", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert executed == [expected, expected]


def test_a_node_with_other_versions_or_files_is_refused(tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    from kfacpack.experiments.ray_cluster import _require_same_keys

    write_images(tmp_path / "mine", {split: {"red": 1, "blue": 1} for split in ("train", "validation", "test")})
    plan = parse(TEXT.replace("weaves]", "{name: mine, data: mine}]"), "plan").based_at(tmp_path)
    context = RunContext(plan, CPU)
    context.data_key("mine", "train")
    keys = {**context.shared_keys(), "kfacpack": version("kfacpack")}

    def check(**changed):
        _require_same_keys(RunContext(plan, CPU), {**keys, **changed}, "10.0.0.7")

    check()
    for changed, problem in (
        ({"kfacpack": "0.0.1"}, "kfacpack is"),
        ({"environment": {**keys["environment"], "torch": "1.0"}}, "torch is"),
        ({"environment": {**keys["environment"], "threads": "64"}}, "threads is"),
        ({"model": "other"}, "the model"),
        ({"data": [["mine", "train", "other"]]}, "the train split of mine"),
    ):
        with refused(KfacpackError, "10.0.0.7", problem, "nodes must"):
            check(**changed)


def test_a_ray_cluster(expected, command, tmp_path, monkeypatch):
    """Three nodes; the driver is killed, and later a node; nothing but the running stages is computed again."""
    pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    out = tmp_path / "out"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, wait=False) for _ in range(2)]
        with command("--ray", cluster.address, "--jobs", 1, "-q") as driver:
            wait_for(lambda: list(out.glob("bundles/*.kfac")))
            driver.send_signal(signal.SIGKILL)
            driver.wait(60)
        before = finished_in(out)
        with command("--ray", cluster.address, "-q") as driver:
            wait_for(lambda: '"worker": 3' in (out / "events.jsonl").read_text())
            cluster.remove_node(nodes[0], allow_graceful=False)
            result = driver.wait(120)
        assert result.returncode == 0, result.stderr
    finally:
        for node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)  # `shutdown` waits for every process of a node
    assert (out / RESULTS).read_bytes() == expected
    names = finished_in(out)
    assert len(names) == len(set(names))
    assert names[: len(before)] == before
    assert [event["event"] for event in events_of(out)].count("retried") <= 1
