"""One except clause catches everything that softprune refuses."""

import inspect

from softprune import errors


def test_every_error_is_a_softprune_error_and_a_value_error() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert len(classes) == 9
    for cls in classes:
        assert issubclass(cls, errors.SoftpruneError)
        assert issubclass(cls, ValueError)
        assert cls.__doc__
