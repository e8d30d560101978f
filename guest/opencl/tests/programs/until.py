# Determines when a program ends: after this many seconds or, with `input`, when its input has ended.
import select
import sys
import time


def ends(argument):
    if argument == "input":
        return lambda: bool(select.select([sys.stdin], [], [], 0)[0])
    end = time.monotonic() + float(argument)
    return lambda: time.monotonic() >= end
