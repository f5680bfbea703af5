import pytest

from replayssm_orch.actors.failures import one_line, sendable


class Stubborn(Exception):
    """Like many exceptions of libraries: pickles, and does not come back."""

    def __init__(self, layer, reason):
        super().__init__(f"{layer}: {reason}")


def test_an_exception_that_cannot_travel_arrives_as_its_text():
    @sendable
    def fail():
        raise Stubborn("layers.0", "no kernel")

    with pytest.raises(RuntimeError, match=r"Stubborn: layers\.0: no kernel") as caught:
        fail()
    assert "test_failures.py" in str(caught.value)


def test_an_exception_that_can_travel_stays_itself():
    @sendable
    def fail():
        raise ValueError("as it is")

    with pytest.raises(ValueError, match=r"^as it is$"):
        fail()


def test_a_message_of_many_lines_becomes_one_bounded_line():
    line = one_line(ValueError("a\n  b\n" + "c" * 1000))
    assert line.startswith("ValueError: a b ccc")
    assert len(line) == 400
