"""Runs the unit tests of a module, and says of each what has become of it; with --list names the modules of a
package that have some."""
import importlib
import pathlib
import sys
import unittest


class Result(unittest.TestResult):
    def say(self, word, test, error=None):
        last = str(error[1]).strip().splitlines() if error else []
        print(word, test.id(), error[0].__name__ if error else "", last[-1][:200] if last else "", flush=True)

    def addSuccess(self, test):
        self.say("PASSED", test)

    def addFailure(self, test, error):
        self.say("FAILED", test, error)

    def addError(self, test, error):
        self.say("ERROR", test, error)

    def addSkip(self, test, reason):
        self.say("SKIPPED", test)

    def addExpectedFailure(self, test, error):
        self.say("PASSED", test)

    def addUnexpectedSuccess(self, test):
        self.say("FAILED", test)

    def addSubTest(self, test, subtest, error):
        if error:
            self.say("FAILED", test, error)


def main():
    if sys.argv[1] != "--list":
        unittest.defaultTestLoader.loadTestsFromName(sys.argv[1]).run(Result())
        return
    for folder in importlib.import_module(sys.argv[2]).__path__:
        for file in sorted(pathlib.Path(folder).rglob("test_*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if "benchmarks" not in parts:
                print(".".join((sys.argv[2], *parts)))


# Processes that tests start import this file, too.
if __name__ == "__main__":
    main()
