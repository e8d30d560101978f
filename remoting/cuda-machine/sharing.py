"""Shares and tails of PyTorch programs that share a GPU by weight: sharing.py OUT FOLDER [PART...]

FOLDER has gantry-arbiter, gantry-nvidia, libgantry_nvidia_preload.so, and what pack.sh puts there. A program's name says what it
is: "remoted-" where its calls are remoted (without it, it is a native context), what it runs (sharer.py), its weight or "idle",
its latency ("-l2"), and a "+" for the second GPU. Each has a worker of its own; those of JOINED share another one's. All wait
while others are measured. Results are written to OUT/sharing.txt. In the environment: SECONDS, for how long each mix is measured
(5), and POLICY (ledger). Parts:

  mixes    all mixes of native contexts
  latency  a latency for one of two, and an idle client
  served   requests that arrive at random, convolutions, pauses
  default  the first mixes without an arbiter: the driver's own slices
  both     a program of a native context beside one whose calls are remoted
  remoted  all mixes, with calls that are remoted; several programs of one client, and a second GPU if there is one
  endless  a kernel that does not end, beside others
"""
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

out, folder, parts = sys.argv[1], os.path.realpath(sys.argv[2]), sys.argv[3:]
parts = parts or ["mixes", "latency", "served", "both", "endless", "default"]
seconds, policy = float(os.environ.get("SECONDS", "5")), os.environ.get("POLICY", "ledger")
work = tempfile.mkdtemp()
begin = time.monotonic()
arbiter = work + "/arbiter"
processes = []
MIXES = [["train1", "train3"], ["decode1", "train3"], ["decode1", "hog3"], ["hog1", "hog3"], ["train1", "decode2", "hog3"],
         ["train1", "train2", "train2b", "train3", "train3b", "train4"]]
JOINED = {"remoted-train1x": "remoted-train1", "remoted-train1y": "remoted-train1"}
PARTS = {
    "mixes": MIXES,
    "latency": [["decode1", "train3"], ["decode1-l2", "train3"], ["decode1", "hog3"], ["decode1-l2", "hog3"],
                ["serve1", "train3"], ["serve1-l2", "train3"], ["train1", "remoted-hog-idle"]],
    "served": [["serve1", "hog3"], ["serve2", "convolve1", "train1"], ["convolve1", "convolve3"],
               ["pause1", "train3"], ["serve1", "pause1", "decode2", "hog3"]],
    "default": MIXES,
    "both": [["train1", "remoted-train3"], ["remoted-decode1", "hog3"], ["decode1", "remoted-hog3"]],
    "remoted": [["remoted-" + name for name in names] for names in MIXES] + [["remoted-train1", *JOINED, "remoted-train3"]],
    "endless": [["decode1"], ["decode1", "train3"]],
}
if subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("UUID") > 1:
    PARTS["remoted"] += [["remoted-train1+"], ["remoted-train1", "remoted-train1+"],
                         ["remoted-train1", "remoted-train3", "remoted-train1+", "remoted-train3+"]]


def is_remoted(name):
    return name.startswith("remoted-")


def kind(name):
    return re.match("(remoted-)?([a-z]+)", name)[2]


def alike(name):
    """The program that runs alone what this one runs."""
    return ("remoted-" if is_remoted(name) else "") + kind(name)


def shared(name):
    """Name, weight and latency of a program's client, as options."""
    weight, latency = re.search("[0-9]|idle", name)[0], re.search("-l([0-9]+)", name)
    return ["--name", name, "--weight", weight] + (["--latency", latency[1]] if latency else [])


def say(*words):
    text = " ".join(map(str, words))
    print(f"[{time.monotonic() - begin:6.1f}] {text}", flush=True)
    with open(out + "/sharing.txt", "a") as file:
        print(text, file=file)


def wait_for(path):
    for _ in range(600):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    sys.exit(f"{path} does not come")


def start(words, errors, **options):
    process = subprocess.Popen(words, stderr=open(f"{out}/{errors}.txt", "a"), **options)
    processes.append(process)
    return process


def start_arbiter():
    process = start([folder + "/gantry-arbiter", "--socket", arbiter, "--policy", policy], "arbiter")
    wait_for(arbiter)
    return process


def clients():
    """What the arbiter says of each client."""
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(arbiter + ".status")
    except OSError:
        return {}
    with stream.makefile() as file:
        return {client["name"]: client for client in json.load(file)["clients"]}


def device_time():
    return {name: client["device_time"] / 1e9 for name, client in clients().items()}


class Driver:
    """The host's driver, for workers to which calls are remoted."""

    def __init__(self):
        found = subprocess.run("ldconfig -p | sed -n 's/.*libcuda.so.1 .*x86-64.*=> //p'; "
                               "find /usr/local/nvidia /usr/lib -name libcuda.so.1 2> /dev/null",
                               shell=True, capture_output=True, text=True).stdout.split()
        self.library = os.environ.get("GANTRY_DRIVER") or found[0]
        readable, self.options = [os.path.dirname(os.path.realpath(self.library))], []
        try:
            import nvidia
            for path in nvidia.__path__:
                for place, _, files in os.walk(path):
                    if "libcublas.so.13" in files:
                        self.options = ["--cuda-libraries", place]
                        readable.append(os.path.dirname(os.path.realpath(place + "/libcublas.so.13")))
        except ImportError:
            pass
        self.options += [word for path in readable for word in ("--readable", path)]
        for link, target in [("libcuda.so.1", "libgantry_cuda.so"), ("libcuda.so", "libcuda.so.1")]:
            if not os.path.lexists(f"{folder}/guest/{link}"):
                os.symlink(target, f"{folder}/guest/{link}")
        # Libraries of Python packages have paths of their own, which go before LD_LIBRARY_PATH.
        preload = [f"{folder}/guest/{name}" for name in ["libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"]]
        self.preload = ":".join(path for path in preload if os.path.exists(path))
        os.makedirs(work + "/cache", exist_ok=True)


class Program:
    def __init__(self, name):
        self.name, way = name, f"{work}/{JOINED.get(name, name)}.socket"
        environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        if not is_remoted(name):
            start([folder + "/gantry-nvidia", "--socket", way, "--gpu", "0", "--slice", "4096", "--arbiter", arbiter, *shared(name)],
                  "worker-" + name)
            environment.update(GANTRY_NVIDIA_SOCKET=way, LD_PRELOAD=folder + "/libgantry_nvidia_preload.so")
        else:
            if name not in JOINED:
                start([folder + "/gantry-accel", "serve", "--api", "cuda", "--socket", way, "--cache", work + "/cache", "--library",
                       driver.library, "--arbiter", arbiter, "--devices", "1" if name.endswith("+") else "0", *shared(name),
                       *driver.options], "pool-" + name)
            # PyTorch counts GPUs by the host's NVML.
            environment.update(GANTRY_CUDA=way, LD_PRELOAD=driver.preload, CUDA_VISIBLE_DEVICES="0")
        wait_for(way)
        self.process = start([sys.executable, os.path.dirname(os.path.realpath(__file__)) + "/sharer.py", kind(name)], "errors-" + name,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ready(self):
        return self.process.stdout.readline().strip() == "ready"

    def go(self, time_):
        self.process.stdin.write(f"{time_}\n")
        self.process.stdin.flush()

    def result(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line.strip() else {"rate": 0, "ended": self.process.poll()}


def measure(names, time_):
    before = device_time()
    for name in names:
        programs[name].go(time_)
    results = {name: programs[name].result() for name in names}
    after = device_time()
    used = {name: after.get(name, 0) - before.get(name, 0) for name in [*names, "endless1"] if name not in JOINED}
    return results, used


def measure_mix(what, names):
    results, used = measure(names, seconds)
    of_alone = [results[name]["rate"] / alone[alike(name)] for name in names]
    steps = [results[name]["rate"] * STEP.get(kind(name), 0) for name in names]
    parts = [of_alone, [one / (sum(steps) or 1) if all(steps) else 0 for one in steps], [one / (sum(used.values()) or 1) for one in used.values()]]
    rounded = [[round(value, 3) for value in values] for values in parts]
    say(what, *names, "of alone", rounded[0], "sum", round(sum(of_alone), 3), "shares by rates", rounded[1], "by the record", rounded[2],
        "recorded", round(sum(used.values()) / seconds, 3))
    for name in names:
        say("   ", name, results[name])


# Milliseconds of the device in a step, by the record of an H200 with the driver's own slices (measurements/sharing.md).
STEP = {"train": 0.745, "decode": 0.199, "hog": 3.16}
needed = {name for part in parts for names in PARTS[part] for name in names}
driver = Driver() if any(map(is_remoted, needed)) else None
server = start_arbiter()
programs, alone = {}, {}
try:
    # Pools first: they try time slices, which nobody is to disturb.
    for name in sorted(needed, key=lambda name: (not is_remoted(name), name in JOINED, name)):
        programs[name] = Program(name)
    for name, program in list(programs.items()):
        if not program.ready():
            say(name, "does not start:", open(f"{out}/errors-{name}.txt").read()[-500:])
            del programs[name]
    say("ready; clients", {name: (client["weight"], client["workers"]) for name, client in clients().items()})
    for name in sorted(programs):
        if alike(name) not in alone:
            results, used = measure([name], 2)
            alone[alike(name)] = results[name]["rate"] or 1
            say("alone", name, results[name], "device", round(sum(used.values()) / 2, 3))
    for part in parts:
        if part == "default":
            server.kill()
            server.wait()
            os.unlink(arbiter)
            os.unlink(arbiter + ".status")
            time.sleep(1)
        elif part == "endless":
            endless = programs["endless1"] = Program("endless1")
            if not endless.ready():
                sys.exit("endless1 does not start")
            endless.go(1)
            time.sleep(0.3)
        for names in PARTS[part]:
            if not all(name in programs for name in names):
                say(part, *names, "not all of them run")
            elif part == "endless":
                results, used = measure(names, seconds)
                say("beside endless1:", results, {name: round(time_, 2) for name, time_ in used.items()},
                    "its program has ended" if endless.process.poll() is not None else "it goes on")
            else:
                measure_mix(part, names)
        if part == "default":
            server = start_arbiter()
            time.sleep(1)
            say("another arbiter; clients", sorted(clients()))
        elif part == "endless":
            endless.process.kill()
            endless.process.wait()
    ended = [name for name, program in programs.items() if name != "endless1" and program.process.poll() is not None]
    say("programs that have ended:", ended, "killed by the arbiter:", sum(client["killed"] for client in clients().values()))
finally:
    for process in reversed(processes):
        process.kill()
    for process in processes:
        process.wait()
