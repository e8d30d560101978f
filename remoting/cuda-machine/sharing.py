"""Shares and tails of PyTorch programs that share a GPU, by policy: sharing.py OUT FOLDER POLICY[,POLICY...]

FOLDER has what pack.sh puts there, and gantry-arbiter; results are written to OUT/sharing.txt. Each program (sharer.py) has a pool of
its own, whose weight is the digit in its name; those of JOINED share another one's. On a machine with two GPUs, programs with "+" in
their names use the second one. All programs wait while others are measured. SECONDS in the environment: for how
long each mix is measured (5)."""
import atexit
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

out, folder, policies = sys.argv[1], os.path.realpath(sys.argv[2]), sys.argv[3].split(",")
here = os.path.dirname(os.path.realpath(__file__))
seconds = float(os.environ.get("SECONDS", "5"))
work = tempfile.mkdtemp()
guest = folder + "/guest"
begin = time.monotonic()
PROGRAMS = ["train1", "decode1", "decode2", "train3", "hog3", "hog1", "train2", "train2b", "train3b", "train4"]
MIXES = [["train1", "train3"], ["decode1", "train3"], ["decode1", "hog3"], ["hog1", "hog3"], ["train1", "decode2", "hog3"],
         ["train1", "train2", "train2b", "train3", "train3b", "train4"]]
# Client of several programs: each is beside those of its pool.
JOINED = {"train1x": "train1", "train1y": "train1"}
MIXES.append(["train1", "train1x", "train1y", "train3"])
if subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("UUID") > 1:
    PROGRAMS += ["train1+", "train3+"]
    MIXES += [["train1+"], ["train1", "train1+"], ["train1", "train3", "train1+", "train3+"]]


def kind(name):
    return re.match("[a-z]+", name)[0]


def pool(name):
    return JOINED.get(name, name)


def weight(name):
    return re.search("[0-9]", name)[0]


def say(*words):
    text = " ".join(map(str, words))
    print(f"[{time.monotonic() - begin:6.1f}] {text}", flush=True)
    with open(out + "/sharing.txt", "a") as file:
        print(text, file=file)


def found(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.split()[0]


driver = os.environ.get("GANTRY_DRIVER") or found("ldconfig -p | sed -n 's/.*libcuda.so.1 .*x86-64.*=> //p'; "
                                                  "find /usr/local/nvidia /usr/lib -name libcuda.so.1 2> /dev/null")
readable = [os.path.dirname(os.path.realpath(driver))]
libraries = []
try:
    import nvidia
    for path in nvidia.__path__:
        for place, _, files in os.walk(path):
            if "libcublas.so.13" in files:
                libraries = ["--cuda-libraries", place]
                readable.append(os.path.dirname(os.path.realpath(place + "/libcublas.so.13")))
except ImportError:
    pass
for link, target in [("libcuda.so.1", "libgantry_cuda.so"), ("libcuda.so", "libcuda.so.1")]:
    if not os.path.lexists(f"{guest}/{link}"):
        os.symlink(target, f"{guest}/{link}")
# Libraries of Python packages have paths of their own, which go before LD_LIBRARY_PATH.
preload = [f"{guest}/{name}" for name in ["libcuda.so.1", "libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"]]
preload = ":".join(path for path in preload if os.path.exists(path))


def end_children():
    for child in children:
        child.kill()


children = []
atexit.register(end_children)


class Program:
    def __init__(self, name, way):
        environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", GANTRY_CUDA=way, LD_PRELOAD=preload,
                           # PyTorch counts GPUs by the host's NVML.
                           CUDA_VISIBLE_DEVICES="0")
        self.process = subprocess.Popen(
            [sys.executable, here + "/sharer.py", kind(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(f"{out}/errors-{name}.txt", "a"), text=True, env=environment)
        children.append(self.process)

    def ready(self):
        return self.process.stdout.readline().strip() == "ready"

    def go(self, time_):
        self.process.stdin.write(f"{time_}\n")
        self.process.stdin.flush()

    def result(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line.strip() else {"rate": 0, "ended": self.process.poll()}


def wait_for(path):
    for _ in range(300):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    sys.exit(f"{path} does not come")


def device_time(arbiter):
    """Seconds of the device by client."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(arbiter + ".status")
    with stream.makefile() as file:
        return {client["name"]: client["device_time"] / 1e9 for client in json.load(file)["clients"]}


def measure(programs, names, time_, arbiter):
    before = device_time(arbiter)
    for name in names:
        programs[name].go(time_)
    results = {name: programs[name].result() for name in names}
    after = device_time(arbiter)
    pools = {*map(pool, names), "endless1"}
    return results, {name: after.get(name, 0) - before.get(name, 0) for name in pools}


for policy in policies:
    place = f"{work}/{policy}"
    os.makedirs(place)
    os.makedirs(work + "/cache", exist_ok=True)
    arbiter = place + "/arbiter"
    servers = [subprocess.Popen([folder + "/gantry-arbiter", "--socket", arbiter, "--policy", policy],
                                stderr=open(f"{out}/arbiter-{policy}.txt", "a"))]
    children.append(servers[0])
    wait_for(arbiter)
    for name in [*PROGRAMS, "endless1"]:
        servers.append(subprocess.Popen(
            [folder + "/gantry-accel", "serve", "--api", "cuda", "--socket", f"{place}/{name}", "--cache", work + "/cache",
             "--library", driver, "--arbiter", arbiter, "--name", name, "--weight", weight(name), *libraries,
             "--devices", "1" if name.endswith("+") else "0"]
            + [word for path in readable for word in ("--readable", path)],
            stderr=open(f"{out}/pool-{policy}-{name}.txt", "a")))
        children.append(servers[-1])
        wait_for(f"{place}/{name}")
    programs = {name: Program(name, f"{place}/{pool(name)}") for name in [*PROGRAMS, *JOINED]}
    for name, program in programs.items():
        if not program.ready():
            sys.exit(f"{name} does not start: {out}/errors-{name}.txt")
    alone = {}
    for name in ["train1", "decode1", "hog3"]:
        results, used = measure(programs, [name], 2, arbiter)
        alone[kind(name)] = (results[name]["rate"], used[name] / 2)
        say(policy, "alone", name, results[name], "device", round(used[name] / 2, 3))
    for names in MIXES:
        results, used = measure(programs, names, seconds, arbiter)
        parts = [results[name]["rate"] / alone[kind(name)][0] for name in names]
        device = [part * alone[kind(name)][1] for part, name in zip(parts, names)]
        rounded = [[round(value, 3) for value in values]
                   for values in (parts, [one / (sum(device) or 1) for one in device])]
        arbiters = {name: round(time_ / (sum(used.values()) or 1), 3) for name, time_ in used.items()}
        say(policy, *names, "of alone", rounded[0], "sum", round(sum(parts), 3), "shares of device time", rounded[1],
            "by the arbiter", arbiters)
        for name in names:
            say("   ", name, results[name])
    endless = Program("endless1", f"{place}/endless1")
    if endless.ready():
        endless.go(1)
        time.sleep(0.3)
        for names in [["decode1"], ["decode1", "train3"]]:
            results, used = measure(programs, names, 12 if len(names) == 1 else 4, arbiter)
            say(policy, "beside endless1:", results, {name: round(time_, 2) for name, time_ in used.items()},
                "its program has ended" if endless.process.poll() is not None else "it goes on")
    for program in [*programs.values(), endless]:
        program.process.kill()
    for server in reversed(servers):
        server.terminate()
