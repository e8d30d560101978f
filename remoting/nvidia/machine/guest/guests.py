"""VMs whose consoles are this program's: started, saved, restored, and asked to run programs."""
import base64
import gzip
import os
import re
import subprocess
import threading
import time

# From noxsave on, all is for a KVM that emulates ring 0 (README.md).
CMDLINE = (
    "console=hvc0 quiet loglevel=3 root=/dev/vda ro init=/init random.trust_cpu=on mitigations=off profile=6 "
    "noxsave zeroed_memory tsc=reliable no_timer_check swiotlb=noforce initcall_blacklist=blake2s_mod_init "
    "clearcpuid=cx16,smap,smep,popcnt,fsgsbase,invpcid,pcid,umip,rdtscp,xsave,erms,fsrm "
    "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM:"
    "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967295:glibc.malloc.arena_max=1:glibc.malloc.top_pad=67108864"
)


class Ended(Exception):
    """A guest has ended, or said nothing in time."""


class Guest:
    """A VM."""

    def __init__(self, name, out, command):
        self.name, self.out = name, out
        self.lines, self.change, self.has_ended = [], threading.Condition(), False
        self.api = os.path.join(out, name + ".api")
        self.errors = open(os.path.join(out, name + ".gantry"), "wb")
        self.console = open(os.path.join(out, name + ".console"), "wb")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--api-socket", self.api],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.console.write(b"[%.1f] " % (time.monotonic() - self.began) + line)
            self.console.flush()
            with self.change:
                self.lines.append(line.decode(errors="replace").rstrip("\r\n"))
                self.change.notify_all()
        with self.change:
            self.has_ended = True
            self.change.notify_all()

    def send(self, line):
        """A line to the guest's console."""
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise Ended(f"guest {self.name} has ended") from error

    def until(self, pattern, seconds):
        """Lines up to the first that matches, and that line's match."""
        end, before = time.monotonic() + seconds, []
        with self.change:
            while True:
                while self.lines:
                    line = self.lines.pop(0)
                    if match := re.match(pattern, line):
                        return before, match
                    before.append(line)
                    if "Kernel panic" in line:
                        raise Ended(f"guest {self.name}: {line}")
                if self.has_ended:
                    raise Ended(f"guest {self.name} ended before {pattern!r}: {before[-3:]}")
                left = end - time.monotonic()
                if left <= 0:
                    raise Ended(f"guest {self.name} did not print {pattern!r} in {seconds:.0f} s: {before[-3:]}")
                self.change.wait(min(left, 1))

    def control(self, *words):
        """A request to the VMM."""
        done = subprocess.run([GANTRY, "ctl", "--socket", self.api, *words], capture_output=True, text=True)
        if done.returncode:
            raise Ended(f"guest {self.name}: {words[0]}: {done.stderr.strip()}")

    def save(self, folder):
        """Pauses, saves and ends the VM. Returns the seconds that the pause and the snapshot took."""
        os.makedirs(folder)
        begin = time.monotonic()
        self.control("pause")
        self.control("snapshot", folder)
        took = time.monotonic() - begin
        self.kill()
        return took

    def run(self, name, seconds, command):
        """Runs a program. Returns its exit code, and by name: output, errors, usage, agent.log, profile."""
        self.send(f"run {name} {seconds} {command}")
        return self.results(seconds + 60)

    def results(self, seconds):
        """What the guest prints of a program's end."""
        _, match = self.until(r"GUEST code (\S+) (\d+)", seconds)
        code, files = int(match[2]), {}
        while True:
            _, match = self.until(r"GUEST (file (\S+)|done)", 60)
            if match[1] == "done":
                return code, files
            lines, _ = self.until("GUEST end", 60)
            files[os.path.basename(match[2])] = base64.b64decode("".join(lines))

    def kill(self):
        """Ends the VMM at once."""
        self.process.kill()
        self.process.wait()


GANTRY = None


def restored(name, out, snapshot, folder, *more):
    """A VM from a snapshot, whose serial port is not shared with others'; `more` is added to the request. Returns it and the
    seconds until it runs."""
    os.makedirs(folder)
    for entry in os.listdir(snapshot):
        os.link(os.path.join(snapshot, entry), os.path.join(folder, entry))
    begin = time.monotonic()
    guest = Guest(name, out, [GANTRY, "--restore", ",".join([f"source_url=file://{folder}", "resume=on", *more])])
    while True:
        done = subprocess.run([GANTRY, "ctl", "--socket", guest.api, "info"], capture_output=True, text=True)
        if '"Running"' in done.stdout:
            return guest, time.monotonic() - begin
        if guest.process.poll() is not None or time.monotonic() - begin > 120:
            raise Ended(f"guest {name} was not restored: {done.stderr.strip()}")
        time.sleep(0.05)


def started(name, out, kernel, memory, disks, accel, cmdline=""):
    """A VM that boots."""
    return Guest(
        name,
        out,
        [GANTRY, "--kernel", kernel, "--cmdline", f"{CMDLINE} {cmdline}", "--cpus", "boot=1", "--memory", f"size={memory}"]
        + ["--disk", *(f"path={disk},readonly=on" for disk in disks), "--serial", "off", "--console", "tty"]
        + (["--accel", accel] if accel else []),
    )


def usage(text):
    """Seconds of program and kernel, and page faults, of what `time -v` prints."""
    find = lambda label: float((re.search(re.escape(label) + r": ([\d.]+)", text) or [0, 0])[1])
    return {
        "user": find("User time (seconds)"),
        "system": find("System time (seconds)"),
        "faults": int(find("Minor (reclaiming a frame) page faults")) + int(find("Major (requiring I/O) page faults")),
        "switches": int(find("Voluntary context switches")) + int(find("Involuntary context switches")),
    }


def profile(data, symbols):
    """Names of the guest kernel's functions by the share of timer ticks, of a zipped /proc/profile."""
    words = memoryview(gzip.decompress(data)).cast("I")
    step, base = words[0], symbols[0][0]
    counts, at = {}, 0
    for index, count in enumerate(words[1:]):
        if not count:
            continue
        address = base + index * step
        while at + 1 < len(symbols) and symbols[at + 1][0] <= address:
            at += 1
        counts[symbols[at][1]] = counts.get(symbols[at][1], 0) + count
    total = sum(counts.values()) or 1
    return total, sorted(((count / total, name) for name, count in counts.items()), reverse=True)
