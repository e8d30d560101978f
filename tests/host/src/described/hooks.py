"""Hooks of Schemathesis: no request has a null, and what is refused is stated.

A property that is null is taken as absent, which the description says once, and not of each property.
"""

import schemathesis

# Answers that say nothing of the body: the VM is not there, or in a state in which the request makes no sense.
OF_THE_VM = {404, 405, 409}


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


@schemathesis.check
def refusals_are_stated(ctx, response, case):
    """A body that the schema allows is understood, or refused for a reason that the description names.

    Those reasons are the list `x-refusals` of a request: what depends on several fields, or is not supported.
    """
    if response.status_code // 100 != 4 or response.status_code in OF_THE_VM:
        return
    stated = case.operation.definition.raw.get("x-refusals", [])
    why = ": ".join(response.json())
    assert any(reason in why for reason in stated), f"the description does not say that this is refused: {why}"
