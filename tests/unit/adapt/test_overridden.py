"""Tests for lanewise.adapt.overridden."""

from lanewise.adapt.overridden import overridden


class Base:
    size = 3

    def step(self): ...

    def log(self): ...

    @property
    def device(self): ...

    @staticmethod
    def make(): ...

    @classmethod
    def load(cls): ...


class Own(Base):
    size = 4

    def step(self): ...

    @property
    def device(self): ...

    def another(self): ...


def test_methods_and_properties_of_ones_own_are_named():
    assert overridden(Base(), Base, ()) == []
    assert overridden(Own(), Base, ()) == ["device", "step"]
    assert overridden(Own(), Base, ("step",)) == ["device"]


def test_a_method_that_was_put_on_the_object_is_named():
    given = Base()
    given.log = print
    given.size = 5
    assert overridden(given, Base, ()) == ["log"]
