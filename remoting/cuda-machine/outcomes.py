"""A plugin of pytest: writes what becomes of each test to the file that GANTRY_OUTCOMES names, a line each, when it
is known. GANTRY_MOST is how many of a function's tests with parameters are run, evenly chosen. GANTRY_SAMPLE is how many
of a thousand tests are run: those whose CRC-32 of the name, modulo 1000, is less."""
import collections
import os
import zlib

file = os.environ.get("GANTRY_OUTCOMES")
most = int(os.environ.get("GANTRY_MOST", "0"))
sample = int(os.environ.get("GANTRY_SAMPLE", "1000"))


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 1000 < sample]
    if not most:
        return
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    chosen = set()
    for tests in functions.values():
        step = max(len(tests) / most, 1)
        chosen.update(id(tests[int(index * step)]) for index in range(min(most, len(tests))))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def pytest_runtest_logreport(report):
    # With several processes it is the first one that hears of all.
    if not file or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.outcome == "passed" and report.when != "call":
        return
    word = {"passed": "PASSED", "skipped": "SKIPPED", "failed": "FAILED"}[report.outcome]
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = str(crash.message if crash else report.longrepr or "").strip()
    reason = " ".join(reason.split())[:300] if word == "FAILED" else ""
    with open(file, "a", encoding="utf-8", errors="replace") as lines:
        lines.write(f"{word}\t{report.nodeid}\t{reason}\n")
