"""Runs tests that an installed package brings along, and prints what has become of each.

    tested.py unittest MODULE...
    tested.py pytest ARGUMENT...          as of pytest; --pyargs names modules

It succeeds if a test passes: those that fail natively are compared as well."""
import os
import re
import sys
import unittest
import warnings

ADDRESS = re.compile(r"0x[0-9a-f]+")
passed = 0
# What pytest prints does not go there.
printed = os.fdopen(os.dup(1), "w")


def say(word, name):
    global passed
    passed += word == "passed"
    print(word, ADDRESS.sub("ADDRESS", name), file=printed, flush=True)


class Result(unittest.TestResult):
    def addSuccess(self, test):
        say("passed", test.id())

    def addFailure(self, test, error):
        say("failed", test.id())
        print(test.id(), error[1], file=sys.stderr)

    addError = addFailure

    def addSkip(self, test, reason):
        say("skipped", test.id())

    def addExpectedFailure(self, test, error):
        say("passed", test.id())

    def addSubTest(self, test, subtest, error):
        if error:
            self.addFailure(test, error)


class Reporter:
    """For pytest."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            say(report.outcome, report.nodeid)
            if report.failed:
                print(report.nodeid, str(report.longrepr)[-400:], file=sys.stderr)


def main():
    how, names = sys.argv[1], sys.argv[2:]
    sys.argv = sys.argv[:1]
    if how == "unittest":
        warnings.simplefilter("ignore")
        for name in names:
            unittest.defaultTestLoader.loadTestsFromName(name).run(Result())
    else:
        import pytest

        os.dup2(2, 1)
        options = ["-p", "no:cacheprovider", "-q", "--no-header", "-W", "ignore", "--tb=short"]
        pytest.main([*options, *names], plugins=[Reporter()])
    sys.exit(passed == 0)


# Processes that tests start import this file, too.
if __name__ == "__main__":
    main()
