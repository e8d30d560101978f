"""A hook of Schemathesis: no request has a null.

A property that is null is taken as absent, which the description says once, and not of each property.
"""

import schemathesis


def has_null(value):
    if isinstance(value, dict):
        return any(map(has_null, value.values()))
    if isinstance(value, list):
        return any(map(has_null, value))
    return value is None


@schemathesis.hook
def filter_body(context, body):
    return not has_null(body)


@schemathesis.hook
def filter_case(context, case):
    return not has_null(case.body)
